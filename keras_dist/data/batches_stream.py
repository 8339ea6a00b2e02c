"""Data that comes in batches: data sets, sequences, generators, data loaders."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.pipeline import (
    batch_size_of,
    before_shuffles,
    has_cache_in_memory,
    has_seeded_passes,
    seeds_of,
)

# The number of batches that are compared to see whether ranks read the same data.
_LOOKS = 2

_UNEVEN = (tf.RaggedTensor, tf.SparseTensor)


class Stream:
    """Data in batches, whose first batches can be read without being used up.

    Args:
        data: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, or
            an iterator such as a generator. Batches that `first` reads from an iterator
            are buffered, so that a later pass begins with them.
        division: The `Division` of a data set that was divided before its rows were
            decoded, if it was.
        is_declared: Whether the user says that all ranks have the same batches.

    A stream is to be kept until a pass has been read: it holds what would cut a cache
    in a data set short if it were dropped before (`first_batches`).
    """

    def __init__(
        self, data: Any, division: Any = None, is_declared: bool = False
    ) -> None:
        self.data = data
        self.division, self.is_declared = division, is_declared
        self.kind = type(data).__name__.lstrip("_")
        self.length = length_of(data)
        self._is_iterator = isinstance(data, Iterator)
        self._buffered: list[Any] = []
        self._held: list[Any] = []
        self._shapes_of_first: list[tuple[int, ...]] | None = None
        is_dataset = isinstance(data, tf.data.Dataset)
        self.has_seeded_passes = is_dataset and has_seeded_passes(data)
        # Of data whose passes differ by their number, the first pass that was begun.
        self._begun: Iterator[Any] | None = None

    @classmethod
    def of(cls, data: Any) -> "Stream":
        """`data` itself if it is a stream, else a stream of it."""
        return data if isinstance(data, cls) else cls(data)

    @property
    def is_repeatable(self) -> bool:
        """Whether the first batches can be read again."""
        return not self._is_iterator

    def is_short(self, size: int) -> bool:
        """Whether there may be fewer batches than ranks."""
        return self.length is None or self.length < size

    def first(self, count: int) -> list[Any]:
        """The first `count` batches, or as many as there are."""
        if self._is_iterator:
            more = itertools.islice(self.data, max(count - len(self._buffered), 0))
            self._buffered += more
            return self._buffered[:count]
        if self.has_seeded_passes and self.length is None:
            self._begun = self._begun or iter(self.data)
            more = itertools.islice(self._begun, max(count - len(self._buffered), 0))
            self._buffered += more
            return self._buffered[:count]
        if isinstance(self.data, tf.data.Dataset):
            return first_batches(self.data, count, self._held)
        return list(itertools.islice(self, count))

    def __iter__(self) -> Iterator[Any]:
        if self._is_iterator:
            return self._rest(self.data)
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return self._rest(begun)
        if isinstance(self.data, keras.utils.PyDataset):
            is_endless = self.data.num_batches is None
            indices = itertools.count() if is_endless else range(self.data.num_batches)
            return (self.data[index] for index in indices)
        return iter(self.data)

    def _rest(self, batches: Iterable[Any]) -> Iterator[Any]:
        while self._buffered:
            yield self._buffered.pop(0)
        yield from batches

    def as_read(self, batch: Any) -> Any:
        """A batch as Keras hands it to a step; those of a data set as they are."""
        is_dataset = isinstance(self.data, tf.data.Dataset)
        return batch if is_dataset else standardized(batch)

    def fingerprint(self, size: int) -> str:
        """A digest of the first batches: equal if the ranks read the same data.

        Of data whose passes differ by their number it is one of the first elements
        before the shuffle, and `seeds` decide the rest: no pass is begun.
        """
        if self.has_seeded_passes:
            first = self.fingerprint_of_sources(before_shuffles(self.data))
            return f"{first} {self.data.element_spec}"
        return fingerprint_of(self._first_looks(size))

    @property
    def seeds(self) -> list[tuple[int, int]]:
        """Seeds of the shuffles, if they and the number of a pass decide the order."""
        return seeds_of(self.data) if self.has_seeded_passes else []

    def fingerprint_of_sources(self, sources: Sequence[tf.data.Dataset]) -> str:
        """A digest of the first elements of what `data` is made of."""
        return fingerprint_of(
            first_batches(source, _LOOKS, self._held) for source in sources
        )

    def fingerprints(self, size: int) -> list[str]:
        """A digest of each component of the first batches; "" if its rows are equal.

        A component is one tensor of a batch, such as the images or the labels. If only
        some are equal over the ranks, the same rows are changed at random; equal rows
        would show nothing.
        """
        flat = [tf.nest.flatten(batch) for batch in self._first_looks(size)]
        return [
            "" if _has_equal_rows(leaves) else fingerprint_of(leaves)
            for leaves in zip(*flat, strict=False)
        ]

    def _first_looks(self, size: int) -> list[Any]:
        count = max(_LOOKS, size) if self.is_short(size) else _LOOKS
        return self._look(self.first(count))

    @property
    def batch_size(self) -> int | None:
        """Rows in a batch but for the last one; `None` if unknown so far."""
        if isinstance(self.data, tf.data.Dataset):
            return batch_size_of(self.data)
        shapes = self._shapes_of_first
        return shapes[0][0] if shapes and shapes[0] else None

    def shapes_of_first(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors of the first batch, which is read if it was not yet."""
        if self._shapes_of_first is None:
            self._look(self.first(1))
        return self._shapes_of_first or []

    def _look(self, batches: list[Any]) -> list[Any]:
        leaves = keras.tree.flatten([self.as_read(batch) for batch in batches[:1]])
        shapes = [tuple(leaf.shape) for leaf in leaves if leaf is not None]
        self._shapes_of_first = shapes
        return batches

    def num_first_rows(self, size: int) -> int:
        """Rows in the first `size` batches."""
        return sum(map(num_rows, self.first(size)))


def first_batches(dataset: tf.data.Dataset, count: int, held: list[Any]) -> list[Any]:
    """The first `count` batches of a data set, or as many as there are.

    An iterator that is dropped after some batches may make a cache in memory complete
    too early: a thread still reads ahead through the cache, and a `prefetch` in front
    of it reports "end of data" when it is canceled (docs/decisions.md). Such an
    iterator is appended to `held`, which is to be kept until a pass has been read.

    >>> [int(number) for number in first_batches(tf.data.Dataset.range(5), 2, [])]
    [0, 1]
    """
    if not has_cache_in_memory(dataset):
        return list(dataset.take(count))
    held.append(iter(dataset))
    return list(itertools.islice(held[-1], count))


def is_stream(data: Any) -> bool:
    """Whether `data` comes in batches that can be read one by one."""
    if isinstance(data, (list, tuple, dict, str, bytes)) or hasattr(data, "shape"):
        return False
    is_batches = isinstance(data, (tf.data.Dataset, keras.utils.PyDataset, Iterator))
    return is_batches or hasattr(data, "__iter__")


def length_of(data: Any) -> float | None:
    """Batches in one pass over `data`: a number, `math.inf`, or `None` for unknown.

    >>> length_of(tf.data.Dataset.range(3)), length_of(iter([]))
    (3, None)
    >>> length_of(tf.data.Dataset.range(3).repeat())
    inf
    """
    if isinstance(data, tf.data.Dataset):
        cardinality = int(data.cardinality())
        if cardinality == tf.data.INFINITE_CARDINALITY:
            return math.inf
        return cardinality if cardinality >= 0 else None
    if isinstance(data, keras.utils.PyDataset):
        return math.inf if data.num_batches is None else data.num_batches
    try:
        return len(data)
    except TypeError:
        return None


def finite_or_none(length: float | None) -> int | None:
    """A number of batches; `None` if it is unknown or infinite.

    >>> finite_or_none(3), finite_or_none(None), finite_or_none(math.inf)
    (3, None, None)
    """
    return None if length is None or length == math.inf else int(length)


def num_rows(batch: Any) -> int:
    """Rows in a batch: the length of the first axis of its first array."""
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            return int(leaf.shape[0])
    return 0


def standardized(batch: Any) -> Any:
    """A batch of a sequence or an iterator as Keras reads it.

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


def _has_equal_rows(leaves: Sequence[Any]) -> bool:
    arrays = [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, _UNEVEN)]
    rows = {
        repr(row) if array.dtype.kind == "O" else row.tobytes()  # text is of objects
        for array in arrays
        if array.ndim
        for row in array
    }
    return len(rows) <= 1


def fingerprint_of(batches: Iterable[Any]) -> str:
    """A digest of the shapes, dtypes and values in some batches."""
    digest = hashlib.sha256()
    for batch in batches:
        for leaf in tf.nest.flatten(batch, expand_composites=True):
            array = np.asarray(leaf)
            digest.update(f"{array.shape} {array.dtype}".encode())
            is_plain = array.dtype.kind != "O"
            digest.update(array.tobytes() if is_plain else repr(array).encode())
    return digest.hexdigest()
