"""Data sets that are divided among the ranks before their rows are decoded.

What `keras_dist.shard` has divided is known by the data set that it returned. A later
`map`, `batch` or `prefetch` makes a new one, which is followed back to its inputs.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.division import local_items
from keras_dist.data.pipeline import (
    assert_length,
    by_window,
    count_batches,
    finite_or_none,
    has_cache_in_memory,
    inputs_of,
)

# Rows of a rank in a window of rows that come from a cache.
_WINDOW = 64


@dataclass(frozen=True, eq=False)
class Presharded:
    """Division of a data set before its rows were decoded: by row.

    Args:
        batch_size: Rows of one rank's batch; `None` if unknown.
        rank: The rank that has these rows: of N the rows r, r + N, ….
        size: Number of ranks.
        source: The data set before it was divided, the same on all ranks.
        is_global: Whether `batch_size` rows are the batch of all ranks, of which rank r
            has the rows r, r + N, ….
    """

    batch_size: int | None
    rank: int
    size: int
    source: tf.data.Dataset
    is_global: bool = False

    @property
    def length(self) -> float | None:
        """Rows of all ranks, `math.inf`, or `None` if unknown."""
        return count_batches(self.source)

    def facts(self) -> tuple[object, ...]:
        """Return what has to be equal on all ranks."""
        kind = "global" if self.is_global else f"of {self.size} ranks"
        return self.batch_size, kind, self.length

    def list_rows(self, rank: int, length: int) -> np.ndarray:
        """List the indices of a rank's rows among the first `length`."""
        rows = np.arange(length)
        if self.is_global:
            return rows[rows % (self.batch_size or 1) % self.size == rank]
        return rows[local_items(rank, self.size)]

    def count_rows(self, rank: int, length: int) -> int:
        """Count the rows that `list_rows` lists."""
        return len(self.list_rows(rank, length))


# How each data set was divided that `divide_rows` has returned.
_KNOWN: "weakref.WeakKeyDictionary[tf.data.Dataset, Presharded]"
_KNOWN = weakref.WeakKeyDictionary()


def divide_rows(
    source: tf.data.Dataset,
    *,
    batch_size: int | None,
    rank: int,
    size: int,
    is_global: bool = False,
) -> tf.data.Dataset:
    """Return the rows of one rank, which `presharded_of` recognizes after a `map`.

    `source` has the same rows on all ranks; see `Presharded` for the others.

    >>> rows = tf.data.Dataset.range(7)
    >>> own = [divide_rows(rows, batch_size=2, rank=rank, size=2) for rank in (0, 1)]
    >>> [[int(row) for row in data] for data in own]
    [[0, 2, 4, 6], [1, 3, 5]]
    """
    presharded = Presharded(batch_size, rank, size, source, is_global)
    length = finite_or_none(presharded.length)
    own = None if length is None else presharded.count_rows(rank, length)
    if is_global or has_cache_in_memory(source):
        # `shard` ends with this rank's last element, and would cut a cache short.
        count = batch_size if is_global and batch_size else _WINDOW * size
        dataset = by_window(source, count, lambda rows, _: rows.shard(size, rank))
    else:
        dataset = source.shard(size, rank)
    if presharded.length == math.inf:
        own = tf.data.INFINITE_CARDINALITY
    if own is not None:
        dataset = assert_length(dataset, own)
    _KNOWN[dataset] = presharded
    return dataset


def presharded_of(data: object) -> Presharded | None:
    """Find how `data`, or what it was made of, was divided; `None` if it was not.

    Raises:
        ValueError: If it was made of several data sets that were divided differently.
    """
    if not isinstance(data, tf.data.Dataset):
        return None
    if data in _KNOWN:
        return _KNOWN[data]
    found = [presharded_of(input_data) for input_data in inputs_of(data)]
    if len({one and one.facts() for one in found}) > 1:
        kinds = ", ".join("none" if one is None else "by row" for one in found)
        raise ValueError(
            "A data set is made of several others that `keras_dist.shard` has not "
            f"divided alike. Received: divisions {kinds} in a {type(data).__name__}. "
            "Apply `shard` once, to the data set that is made of them."
        )
    return found[0] if found else None


def length_before_repeat(dataset: tf.data.Dataset) -> float | None:
    """Return the length of the last finite stage of endless data, after the division.

    It is `math.inf` if the data was endless before it was divided.
    """
    length = count_batches(dataset)
    inputs = [] if dataset in _KNOWN else inputs_of(dataset)
    if length != math.inf or len(inputs) != 1:
        return length
    return length_before_repeat(inputs[0])


def rows_per_step(
    presharded: Presharded, data: tf.data.Dataset, lengths: Sequence[int]
) -> int | None:
    """Count the rows of all ranks in a step; `None` if they may not be rows of before.

    Each row must have become one row of a batch: none was left out or added after the
    division.

    Args:
        presharded: How the data was divided.
        data: The batches of this rank.
        lengths: The batches of each rank.
    """
    length = finite_or_none(presharded.length)
    first = keras.tree.flatten(data.element_spec)[0].shape
    rows = presharded.batch_size or (first[0] if first.rank else None)
    if length is None or rows is None:
        return None
    counts = [presharded.count_rows(rank, length) for rank in range(presharded.size)]
    is_whole = list(lengths) == [-(-count // rows) for count in counts]
    return rows * presharded.size if is_whole else None


def skip_read_rows(
    presharded: Presharded, data: tf.data.Dataset, read: int, per_step: int
) -> tf.data.Dataset:
    """Return the batches of this rank behind `read` rows of all ranks."""
    if read % per_step == 0:
        return data.skip(read // per_step)
    rows = data.unbatch().skip(presharded.count_rows(presharded.rank, read))
    return rows.batch(per_step // presharded.size)
