"""Data that comes in batches, seen in one way: data sets, sequences, streams."""

import contextlib
import functools
import hashlib
import itertools
import random
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import private
from keras_dist.data.arrays import RAGGED_OR_SPARSE
from keras_dist.data.draws import (
    get_states,
    preserve_generators,
    preserve_states,
    set_states,
)
from keras_dist.data.pipeline import (
    as_untuned,
    count_batches,
    find_batch_size,
    finite_or_none,
    has_cache_in_memory,
    has_seeded_passes,
    is_read_anew,
    is_reshuffled,
    list_seeds,
    list_unshuffled_inputs,
    list_variables,
)
from keras_dist.data.presharded import Presharded, find_presharded

# The number of batches that are compared to see whether ranks read the same data.
_LOOKS = 2

# How many batches of an iterator TensorFlow would have read ahead on one process.
_READ_AHEAD: "weakref.WeakKeyDictionary[Iterator[Any], int]"
_READ_AHEAD = weakref.WeakKeyDictionary()

_is_alone: ContextVar[bool] = ContextVar("is_alone", default=False)


@contextlib.contextmanager
def run_alone() -> Iterator[None]:
    """Context manager in which this rank reads data, or runs what others do not."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def is_alone() -> bool:
    """Return True in a callback of one rank, and in data, which may `predict`."""
    return _is_alone.get() or private.is_in_py_function()


class Source:
    """Data in batches; its first batches can be read without being used up.

    A source is to be kept until a pass has been read: it holds what would cut a cache
    in a data set short if it were dropped before (`_first_batches`).

    Args:
        data: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, or
            an iterator such as a generator, which is never closed (`next_pass`).
        is_sent: Whether the first rank sends the batches: reading one is a collective,
            so the batches of a look are kept until a pass begins.

    Attributes:
        kind: `"dataset"`, `"sequence"` or `"stream"`.
        is_replicated: Whether batch i is the same on all ranks, or may be taken for it.
        random: Indices of the components of a batch that differ from rank to rank.
        length: Batches in a pass: a number, `math.inf`, or `None` for unknown.
        presharded: How it was divided before its rows were decoded, if it was.
        has_seeded_passes: Whether the order of each pass follows from seeds and its
            number, so that beginning one changes all later ones.
        note: What the plan says of it, beside how it is sharded.
        is_read_by_all: Whether every rank makes all batches of a sequence. A look then
            draws random numbers, as that of Keras does.
        is_validation: Whether Keras looks at it after the first epoch alone.
        has_drawn: Whether a look has drawn from `random` or `numpy.random`.
        lengths: Of presharded data, the batches in a pass of each rank, `math.inf`, or
            `None` if unknown.

    Raises:
        ValueError: If a data set was made of several that were divided differently.
    """

    def __init__(self, data: Any, *, is_sent: bool = False) -> None:
        self.data, self.is_sent = data, is_sent
        self.presharded: Presharded | None = find_presharded(data)
        self.is_replicated, self.note = is_sent, ""
        self.random: set[int] = set()
        self.lengths: tuple[float | None, ...] = ()
        self.length = count_batches(self.data)
        is_sequence = isinstance(data, keras.utils.PyDataset)
        self.kind = "sequence" if is_sequence else "stream"
        self.has_seeded_passes = False
        if isinstance(data, tf.data.Dataset):
            self.kind, self.has_seeded_passes = "dataset", has_seeded_passes(data)
        self.is_read_by_all = self.is_validation = self.has_drawn = False
        self._buffered: list[Any] = []
        self._kept: list[Any] | None = None
        self._held: list[Any] = []
        # Of an iterator, or a data set, that has begun: the batches that come next.
        self._unread: Iterator[Any] | None = None

    @property
    def type_name(self) -> str:
        """The name of the data's type, for the plan and for errors."""
        return type(self.data).__name__.lstrip("_")

    @property
    def is_repeatable(self) -> bool:
        """Return True if the first batches can be read again."""
        return not isinstance(self.data, Iterator)

    @property
    def batch_size(self) -> int | None:
        """Rows in a batch but for the last one; `None` if unknown."""
        return find_batch_size(self.data) if self.kind == "dataset" else None

    @property
    def seeds(self) -> list[tuple[int, int]] | None:
        """Seeds of the shuffles, if they and the number of a pass decide the order."""
        return list_seeds(self.data) if self.has_seeded_passes else None

    def is_short(self, size: int) -> bool:
        """Return True if there may be fewer batches than ranks."""
        return self.length is None or self.length < size

    @run_alone()
    def first(self, count: int) -> list[Any]:
        """Read the first `count` batches, or as many as there are.

        The next pass reads them, too. Where they are made anew for it, the generators
        of random numbers go back to where they were.
        """
        if not self.is_repeatable:
            if not self._buffered:
                self._skip_read_ahead(self.data)
            more = 0 if self._unread else max(count - len(self._buffered), 0)
            with self._look(restores=self.is_validation):
                self._buffered += itertools.islice(self.data, more)
            return self._buffered[:count]
        if self.has_seeded_passes and self.length is None:
            # The next pass goes on with this one: another would have another order.
            self._unread = self._unread or iter(as_untuned(self.data))
            more = max(count - len(self._buffered), 0)
            with preserve_generators():
                self._buffered += itertools.islice(self._unread, more)
            return self._buffered[:count]
        if self.kind == "dataset":
            return self._first_batches(self.data, count)
        if self._kept is None or len(self._kept) < count:
            with self._look(restores=not self.is_read_by_all):
                looks = list(itertools.islice(self, count))
            if self.kind != "sequence" and not self.is_sent:
                return looks
            self._kept = looks
        return self._kept[:count]

    @contextlib.contextmanager
    def _look(self, *, restores: bool) -> Iterator[None]:
        """Context manager in which batches are read before their pass."""
        begin = get_states()
        yield
        self.has_drawn |= repr(begin) != repr(get_states())
        if restores:
            set_states(begin)

    def drop_looks(self) -> None:
        """Forget the batches of a look: a pass over a sequence begins."""
        self._kept = None

    def next_pass(self, global_batch: int) -> Iterator[Any]:
        """Begin a pass, as Keras does on one process.

        A generator goes on where the pass before it ended. Keras has looked at two
        batches of it, with which each pass begins, and TensorFlow reads one ahead,
        which is lost where a pass ends. It is left out when the next pass begins: to
        wait for it before might take forever.

        Args:
            global_batch: The batches that are one of one process.
        """
        if self.is_repeatable:
            self._kept, begun = None, self._unread
            looks, self._buffered, self._unread = self._buffered, [], None
            return iter(self) if begun is None else itertools.chain(looks, begun)
        count = _LOOKS * global_batch
        looks = self.first(count)
        if self._unread is None:
            # `chain` does not close a generator that it reads.
            self._unread = itertools.chain(self._buffered[count:], self.data)
        else:
            self._skip_read_ahead(self._unread)

        return self._read_on(looks, self._unread, global_batch)

    def _read_on(
        self, looks: list[Any], unread: Iterator[Any], global_batch: int
    ) -> Iterator[Any]:
        yield from looks[:-1]
        with contextlib.suppress(TypeError):  # some have no weak references
            _READ_AHEAD[self.data] = global_batch
        yield from itertools.chain(looks[-1:], unread)

    def _skip_read_ahead(self, batches: Iterator[Any]) -> None:
        count = 0
        with contextlib.suppress(TypeError):
            count = _READ_AHEAD.pop(self.data, 0)
        next(itertools.islice(batches, count, count), None)

    def __iter__(self) -> Iterator[Any]:
        if not self.is_repeatable:
            return self.next_pass(1)
        if self.kind == "sequence":
            is_endless = self.data.num_batches is None
            indices = itertools.count() if is_endless else range(self.data.num_batches)
            return (self.data[index] for index in indices)
        untuned = as_untuned(self.data)
        # TensorFlow adds a `prefetch` only where it tunes.
        return iter(self.data if untuned is self.data else untuned.prefetch(2))

    @functools.cached_property
    def has_known_order(self) -> bool:
        """Return True if it is known what a pass yields, to skip some of it."""
        if self.kind == "sequence":
            return True
        if self.kind == "stream" or finite_or_none(self.length) is None:
            return False
        if is_reshuffled(self.data):
            # The order of pass k follows from k; `skip_epochs` begins the ones before.
            return self.has_seeded_passes and is_read_anew(self.data)
        before = self.fingerprint()
        with draw_other_numbers():
            return self.fingerprint() == before

    def standardize(self, batch: Any) -> Any:
        """Convert a batch to what Keras hands to a step; of a data set it is that."""
        return batch if self.kind == "dataset" else standardize(batch)

    def fingerprint(self, size: int = 1) -> list[str]:
        """Digest each component of the first batches: alike if ranks read the same.

        A component is one tensor of a batch, such as the images or the labels.

        If each pass has another order by its seeds, the first elements before the
        shuffle are digested, and `seeds` decide the rest: no pass is begun.
        """
        if self.has_seeded_passes:
            inputs = self.fingerprint_inputs(self.data)
            return [*inputs, str(self.data.element_spec)]
        is_short = self.is_repeatable and self.is_short(size)
        batches = self.first(max(_LOOKS, size) if is_short else _LOOKS)
        flat = [tf.nest.flatten(batch) for batch in batches]
        return list(map(digest_batches, zip(*flat, strict=False)))

    def fingerprint_inputs(self, dataset: tf.data.Dataset) -> list[str]:
        """Digest the first elements of what a data set is made of, before a shuffle."""
        inputs = list_unshuffled_inputs(dataset)
        return [digest_batches(self._first_batches(each, _LOOKS)) for each in inputs]

    def _first_batches(self, dataset: tf.data.Dataset, count: int) -> list[Any]:
        """Read the first batches of a data set, or as many as there are.

        An iterator that is dropped after some batches may make a cache in memory
        complete too early: a thread still reads ahead through the cache, and a
        `prefetch` in front of it reports "end of data" when it is canceled
        (docs/decisions.md). Such an iterator is kept until a pass has been read.
        """
        dataset = as_untuned(dataset)
        with preserve_generators(), preserve_states(list_variables(dataset)):
            if not has_cache_in_memory(dataset):
                return list(dataset.take(count))
            self._held.append(iter(dataset))
            return list(itertools.islice(self._held[-1], count))


@contextlib.contextmanager
def draw_other_numbers() -> Iterator[None]:
    """Context manager in which `random` and `numpy.random` draw what they would not."""
    with preserve_generators():
        random.random()
        np.random.random()
        yield


def is_source(data: Any) -> bool:
    """Return True if `data` comes in batches that can be read one by one."""
    if isinstance(data, (list, tuple, dict, str, bytes)) or hasattr(data, "shape"):
        return False
    is_batches = isinstance(data, (tf.data.Dataset, keras.utils.PyDataset, Iterator))
    return is_batches or hasattr(data, "__iter__")


def standardize(batch: Any) -> Any:
    """Convert a batch of a sequence or an iterator to what Keras reads.

    That is `(x,)`, `(x, y)`, `(x, y, sample_weight)` or a dict.

    >>> standardize([1, None])
    (1,)
    """
    if isinstance(batch, dict):
        return batch
    pieces = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    while len(pieces) > 1 and pieces[-1] is None:
        pieces.pop()
    return tuple(keras.tree.lists_to_tuples(part) for part in pieces)


# Begins the digest of a component whose rows are equal: that it does not differ from
# rank to rank says nothing.
EQUAL_ROWS = "equal rows "


def digest_batches(batches: Iterable[Any]) -> str:
    """Digest the shapes, dtypes and values in some batches, or of one component."""
    digest, rows = hashlib.sha256(), set()
    for leaf in tf.nest.flatten(list(batches)):
        for part in tf.nest.flatten(leaf, expand_composites=True):
            array = np.asarray(part)
            digest.update(f"{array.shape} {array.dtype}".encode())
            is_text = array.dtype.kind == "O"
            digest.update(repr(array).encode() if is_text else array.tobytes())
        if not isinstance(leaf, RAGGED_OR_SPARSE) and array.ndim:
            rows |= {repr(row) if is_text else row.tobytes() for row in array}
    return EQUAL_ROWS * (len(rows) <= 1) + digest.hexdigest()
