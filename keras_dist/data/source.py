"""Data that comes in batches, seen in one way: data sets, sequences, streams."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.arrays import UNEVEN
from keras_dist.data.dealer import num_rows
from keras_dist.data.pipeline import (
    as_untuned,
    batch_size_of,
    before_shuffles,
    finite_or_none,
    has_cache_in_memory,
    has_seeded_passes,
    is_read_anew,
    is_reshuffled,
    length_of,
    seeds_of,
    untuned_pass,
)
from keras_dist.data.presharded import Presharded, presharded_of

# The number of batches that are compared to see whether ranks read the same data.
_LOOKS = 2


class Declared:
    """A rank's part of `data`, of which the user says that all ranks have the same.

    `keras_dist.shard` returns it; `dist_fit` reads and shards `data` itself.
    """

    data: Any


class DeclaredIterable(Declared):
    """Every `size`-th element of an iterable, starting at `rank`.

    >>> list(DeclaredIterable("abcde", rank=1, size=2))
    ['b', 'd']
    """

    def __init__(self, data: Iterable[Any], *, rank: int, size: int) -> None:
        self.data = data
        self._rank, self._size = rank, size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.data, self._rank, None, self._size)

    def __len__(self) -> int:
        return len(range(self._rank, len(self.data), self._size))


@dataclass(frozen=True)
class Agreed:
    """Facts about the data that the ranks have learned from each other.

    Args:
        is_same: Whether batch i is the same on all ranks, or may be taken for it.
        note: What the plan says of it, beside how it is sharded.
        lengths: Of presharded data, the batches in a pass of each rank, `math.inf`, or
            `None` if unknown.
        row: A row of another rank, if this one has none of presharded data.
    """

    is_same: bool = False
    note: str = ""
    lengths: tuple[float | None, ...] = ()
    row: Any = None


class Source:
    """Data in batches; its first batches can be read without being used up.

    A source is to be kept until a pass has been read: it holds what would cut a cache
    in a data set short if it were dropped before (`first_batches`).

    Args:
        data: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, or
            an iterator such as a generator. Batches that `first` reads from an iterator
            are buffered, so that a later pass begins with them.
        presharded: How it was divided before its rows were decoded, if it was.
        is_declared: Whether the user says that all ranks have the same batches.
        agreed: What the ranks have learned of each other's data.

    Attributes:
        length: Batches in a pass: a number, `math.inf`, or `None` for unknown.
        has_seeded_passes: Whether the order of each pass follows from seeds and its
            number, so that beginning one changes all later ones.
    """

    def __init__(
        self,
        data: Any,
        *,
        presharded: Presharded | None = None,
        is_declared: bool = False,
        agreed: Agreed | None = None,
    ) -> None:
        self.data, self.presharded = data, presharded
        self.is_declared, self.agreed = is_declared, agreed or Agreed()
        self.length = length_of(data)
        is_dataset = isinstance(data, tf.data.Dataset)
        self.has_seeded_passes = is_dataset and has_seeded_passes(data)
        self._has_known_order: bool | None = None
        self._buffered: list[Any] = []
        self._held: list[Any] = []
        self._first_rows: int | None = None
        # What yields the batches behind those that are buffered.
        self._begun: Iterator[Any] | None = data if isinstance(data, Iterator) else None

    @classmethod
    def of(cls, data: Any) -> "Source":
        """Make a source of the user's data; of what `shard` returned, of all of it.

        Raises:
            ValueError: If a data set was made of several that were divided differently.
        """
        if isinstance(data, Declared):
            return cls(data.data, is_declared=True)
        return cls(data, presharded=presharded_of(data))

    @property
    def kind(self) -> str:
        """`"presharded"`, `"dataset"`, `"sequence"` or `"stream"`."""
        if self.presharded is not None:
            return "presharded"
        if isinstance(self.data, tf.data.Dataset):
            return "dataset"
        is_sequence = isinstance(self.data, keras.utils.PyDataset)
        return "sequence" if is_sequence else "stream"

    @property
    def type_name(self) -> str:
        """The name of the data's type, for the plan and for errors."""
        return type(self.data).__name__.lstrip("_")

    @property
    def is_repeatable(self) -> bool:
        """Tell whether the first batches can be read again."""
        return not isinstance(self.data, Iterator)

    @property
    def batch_size(self) -> int | None:
        """Rows in a batch but for the last one; `None` if unknown so far."""
        if isinstance(self.data, tf.data.Dataset):
            return batch_size_of(self.data)
        return self._first_rows

    @property
    def seeds(self) -> list[tuple[int, int]]:
        """Seeds of the shuffles, if they and the number of a pass decide the order."""
        return seeds_of(self.data) if self.has_seeded_passes else []

    def agree(self, agreed: Agreed) -> None:
        """Set what the ranks have learned of each other's data."""
        self.agreed = agreed

    def is_short(self, size: int) -> bool:
        """Tell whether there may be fewer batches than ranks."""
        return self.length is None or self.length < size

    def first(self, count: int) -> list[Any]:
        """Read the first `count` batches, or as many as there are."""
        if self.has_seeded_passes and self.length is None:
            self._begun = self._begun or self.new_pass()
        if self._begun is not None:
            more = max(count - len(self._buffered), 0)
            self._buffered += itertools.islice(self._begun, more)
            return self._buffered[:count]
        if isinstance(self.data, tf.data.Dataset):
            return first_batches(self.data, count, self._held)
        return list(itertools.islice(self, count))

    def __iter__(self) -> Iterator[Any]:
        if self._begun is not None:
            begun = self._begun
            if self.is_repeatable:
                self._begun = None  # the next pass is another one
            return self._rest(begun)
        if isinstance(self.data, keras.utils.PyDataset):
            is_endless = self.data.num_batches is None
            indices = itertools.count() if is_endless else range(self.data.num_batches)
            return (self.data[index] for index in indices)
        return self.new_pass()

    def new_pass(self) -> Iterator[Any]:
        """Begin another pass over a data set, or data that has iterators."""
        if not isinstance(self.data, tf.data.Dataset):
            return iter(self.data)
        return untuned_pass(self.data)

    def has_known_order(self) -> bool:
        """Tell whether it is known what each pass yields, so that a rank can skip some.

        Of presharded data the rows are compared; what a `map` makes of them may be
        random.
        """
        if self._has_known_order is None:
            self._has_known_order = self._finds_known_order()
        return self._has_known_order

    def _finds_known_order(self) -> bool:
        if self.kind == "sequence":
            return True
        if self.kind == "stream" or finite_or_none(self.length) is None:
            return False
        if is_reshuffled(self.data):
            # The order of pass k follows from k; `skip_epochs` begins the ones before.
            return self.has_seeded_passes and is_read_anew(self.data)

        def look() -> str:
            if self.presharded is None:
                return self.fingerprint(1)
            return self.fingerprint_of_sources(before_shuffles(self.presharded.source))

        return look() == look()

    def as_read(self, batch: Any) -> Any:
        """Convert a batch to what Keras hands to a step; of a data set it is that."""
        is_dataset = isinstance(self.data, tf.data.Dataset)
        return batch if is_dataset else standardized(batch)

    def fingerprint(self, size: int) -> str:
        """Digest the first batches: equal if the ranks read the same data.

        If each pass has another order by its seeds, the first elements before the
        shuffle are digested, and `seeds` decide the rest: no pass is begun.
        """
        if self.has_seeded_passes:
            first = self.fingerprint_of_sources(before_shuffles(self.data))
            return f"{first} {self.data.element_spec}"
        return fingerprint_of(self._first_looks(size))

    def fingerprint_of_sources(self, sources: Sequence[tf.data.Dataset]) -> str:
        """Digest the first elements of what `data` is made of."""
        return fingerprint_of(
            first_batches(source, _LOOKS, self._held) for source in sources
        )

    def fingerprints(self, size: int) -> list[str]:
        """Digest each component of the first batches; "" if its rows are equal.

        A component is one tensor of a batch, such as the images or the labels. If only
        some are equal over the ranks, the same rows are changed at random; equal rows
        would show nothing.
        """
        flat = [tf.nest.flatten(batch) for batch in self._first_looks(size)]
        return [
            "" if _has_equal_rows(leaves) else fingerprint_of(leaves)
            for leaves in zip(*flat, strict=False)
        ]

    def _rest(self, batches: Iterable[Any]) -> Iterator[Any]:
        while self._buffered:
            yield self._buffered.pop(0)
        yield from batches

    def _first_looks(self, size: int) -> list[Any]:
        count = max(_LOOKS, size) if self.is_short(size) else _LOOKS
        batches = self.first(count)
        if batches and not isinstance(self.data, tf.data.Dataset):
            self._first_rows = num_rows(self.as_read(batches[0]))
        return batches


def first_batches(dataset: tf.data.Dataset, count: int, held: list[Any]) -> list[Any]:
    """Read the first `count` batches of a data set, or as many as there are.

    An iterator that is dropped after some batches may make a cache in memory complete
    too early: a thread still reads ahead through the cache, and a `prefetch` in front
    of it reports "end of data" when it is canceled (docs/decisions.md). Such an
    iterator is appended to `held`, which is to be kept until a pass has been read.

    >>> [int(number) for number in first_batches(tf.data.Dataset.range(5), 2, [])]
    [0, 1]
    """
    dataset = as_untuned(dataset)
    if not has_cache_in_memory(dataset):
        return list(dataset.take(count))
    held.append(iter(dataset))
    return list(itertools.islice(held[-1], count))


def is_source(data: Any) -> bool:
    """Tell whether `data` comes in batches that can be read one by one."""
    if isinstance(data, (list, tuple, dict, str, bytes)) or hasattr(data, "shape"):
        return False
    is_batches = isinstance(data, (tf.data.Dataset, keras.utils.PyDataset, Iterator))
    return is_batches or hasattr(data, "__iter__")


def standardized(batch: Any) -> Any:
    """Convert a batch of a sequence or an iterator to what Keras reads.

    That is `(x,)`, `(x, y)`, `(x, y, sample_weight)` or a dict.

    >>> standardized([1, None])
    (1,)
    """
    if isinstance(batch, dict):
        return batch
    pieces = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    while len(pieces) > 1 and pieces[-1] is None:
        pieces.pop()
    return tuple(keras.tree.lists_to_tuples(part) for part in pieces)


def fingerprint_of(batches: Iterable[Any]) -> str:
    """Digest the shapes, dtypes and values in some batches."""
    digest = hashlib.sha256()
    for batch in batches:
        for leaf in tf.nest.flatten(batch, expand_composites=True):
            array = np.asarray(leaf)
            digest.update(f"{array.shape} {array.dtype}".encode())
            is_plain = array.dtype.kind != "O"
            digest.update(array.tobytes() if is_plain else repr(array).encode())
    return digest.hexdigest()


def _has_equal_rows(leaves: Sequence[Any]) -> bool:
    arrays = [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, UNEVEN)]
    rows = {
        repr(row) if array.dtype.kind == "O" else row.tobytes()  # text is of objects
        for array in arrays
        if array.ndim
        for row in array
    }
    return len(rows) <= 1
