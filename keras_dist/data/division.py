"""Divide a `tf.data.Dataset` among the ranks before its rows are decoded.

What `keras_dist.shard` has divided is known by the data set that it returned. A later
`map`, `batch` or `prefetch` makes a new one, which is followed back to its inputs.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist.data import leftover
from keras_dist.data.batches_known_length import checked_length, known_tail_rows
from keras_dist.data.batches_stream import finite_or_none, length_of
from keras_dist.data.pipeline import (
    before_shuffles,
    has_cache_in_memory,
    inputs_of,
    nodes,
)

# Rows of a rank in a window of rows that come from a cache.
_WINDOW = 64


@dataclass(frozen=True, eq=False)
class Division:
    """How a data set was divided before its rows were decoded.

    Args:
        by: `"rows"`: rank r of N has the elements r, r + N, …. `"batches"`: it has the
            batches r, r + N, …. `"files"`: as rows, but an element is a file.
            `"source"`: TensorFlow has divided the files that the data is read from.
        batch_size: Rows of one rank's batch; `None` if unknown or if each element is a
            batch.
        rank: The rank that has these elements.
        size: Number of ranks.
        source: The data set before it was divided, the same on all ranks.
    """

    by: str
    batch_size: int | None
    rank: int
    size: int
    source: tf.data.Dataset

    @property
    def length(self) -> float | None:
        """Elements of all ranks, `math.inf`, or `None` if unknown."""
        return length_of(self.source)

    @property
    def has_batches(self) -> bool:
        """Whether each element is a batch."""
        return self.by == "batches" and self.batch_size is None

    @property
    def is_by_file(self) -> bool:
        """Whether the rows of a rank are those of its files."""
        return self.by in ("files", "source")

    def facts(self) -> tuple[Any, ...]:
        """What has to be equal on all ranks."""
        return f"by {self.by}", self.batch_size, f"of {self.size} ranks", self.length

    def rows_of(self, rank: int, length: int) -> int:
        """How many of the first `length` elements belong to a rank.

        Where the elements are batches, only those of full rounds are counted.
        """
        if self.by != "batches":
            return len(range(rank, length, self.size))
        in_round = self.size * (self.batch_size or 1)
        full, tail = divmod(length, in_round)
        return full * (self.batch_size or 1) + self._rows_of_tail(rank, tail)

    def _rows_of_tail(self, rank: int, tail: int) -> int:
        if self.batch_size is None:
            return 0
        if tail > (self.size - 1) * self.batch_size:  # each rank has a batch
            return min(self.batch_size, tail - rank * self.batch_size)
        return len(range(rank, tail, self.size))


# The division of each data set that `divided` has returned.
_DIVISIONS: "weakref.WeakKeyDictionary[Any, Division]" = weakref.WeakKeyDictionary()


def divided(
    source: tf.data.Dataset, *, by: str, batch_size: int | None, rank: int, size: int
) -> tf.data.Dataset:
    """The elements of one rank, which `division_of` knows again after a `map`.

    Args:
        source: The same elements on all ranks.
        by: As of `Division`.
        batch_size: As of `Division`.
        rank: This rank.
        size: Number of ranks.

    >>> rows = tf.data.Dataset.range(7)
    >>> own = [divided(rows, by="rows", batch_size=2, rank=r, size=2) for r in (0, 1)]
    >>> [[int(row) for row in data] for data in own]
    [[0, 2, 4, 6], [1, 3, 5]]
    >>> data = divided(rows, by="batches", batch_size=2, rank=1, size=2)
    >>> [int(row) for row in data]
    [2, 3, 6]
    """
    division = Division(by, batch_size, rank, size, source)
    if by != "batches":
        dataset = _every(source, rank, size)
    elif batch_size is not None:
        dataset = _by_batch(source, batch_size, rank, size)
    else:
        dataset = _of_batches(source, rank, size)
    own = _known_length(division)
    if own is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(own))
    return remembered(dataset, division)


def remembered(dataset: tf.data.Dataset, division: Division) -> tf.data.Dataset:
    """The same data set, whose division `division_of` knows."""
    _DIVISIONS[dataset] = division
    return dataset


def division_of(data: Any) -> Division | None:
    """How `data`, or what it was made of, was divided; `None` if it was not.

    Raises:
        ValueError: If it was made of several data sets that were not divided alike.
    """
    if not isinstance(data, tf.data.Dataset):
        return None
    if data in _DIVISIONS:
        return _DIVISIONS[data]
    found = [division_of(input_data) for input_data in inputs_of(data)]
    if len({one and one.facts() for one in found}) > 1:
        kinds = ", ".join("none" if one is None else f"by {one.by}" for one in found)
        raise ValueError(
            "A data set is made of several others that `keras_dist.shard` has not "
            f"divided alike. Received: divisions {kinds} in a {type(data).__name__}. "
            "Apply `shard` once, to the data set that is made of them."
        )
    return found[0] if found else None


def sources_of(division: Division) -> list[tf.data.Dataset]:
    """What is compared over the ranks: cheap to read, and not random."""
    if division.by != "source":
        return before_shuffles(division.source)
    return [node for node in nodes(division.source) if not inputs_of(node)]


def length_before_repeat(dataset: tf.data.Dataset) -> float | None:
    """Length of the last stage of endless data, after the division, that is finite.

    It is `math.inf` if the data was endless before it was divided.
    """
    length = length_of(dataset)
    inputs = [] if dataset in _DIVISIONS else inputs_of(dataset)
    if length != math.inf or len(inputs) != 1:
        return length
    return length_before_repeat(inputs[0])


def first_steps(dataset: tf.data.Dataset, steps: int) -> tf.data.Dataset:
    """The first `steps` batches; all are read, or a cache would be cut short.

    >>> [int(number) for number in first_steps(tf.data.Dataset.range(5), 3)]
    [0, 1, 2]
    """

    @tf.autograph.experimental.do_not_convert
    def is_first(number: tf.Tensor, _: Any) -> tf.Tensor:
        return number < steps

    @tf.autograph.experimental.do_not_convert
    def batch_of(_: tf.Tensor, batch: Any) -> Any:
        return batch

    return checked_length(dataset.enumerate().filter(is_first).map(batch_of), steps)


def _known_length(division: Division) -> int | None:
    """Elements of its rank, in the numbers of TensorFlow; `None` if unknown."""
    if division.length == math.inf:
        return tf.data.INFINITE_CARDINALITY
    length = finite_or_none(division.length)
    if length is None:
        return None
    own = division.rows_of(division.rank, length)
    if not division.has_batches:
        return own
    if _has_fixed_rows(division.source):
        return own + (length % division.size > division.rank)
    tail = known_tail_rows(division.source, length=length, size=division.size)
    return None if tail is None else own + (tail > division.rank)


def _every(source: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """The elements `rank`, `rank` + `size`, …."""
    if not has_cache_in_memory(source):
        return source.shard(size, rank)
    # `shard` ends with this rank's last element, and would cut the cache short.
    return _by_window(source, _WINDOW * size, lambda rows, _: rows.shard(size, rank))


def _by_batch(
    source: tf.data.Dataset, batch_size: int, rank: int, size: int
) -> tf.data.Dataset:
    """The rows of the batches `rank`, `rank` + `size`, …; then each `size`-th row."""
    without_last = tf.constant((size - 1) * batch_size, tf.int64)

    def own(rows: tf.data.Dataset, count: tf.Tensor) -> tf.data.Dataset:
        is_full = count > without_last
        of_batch = rows.skip(rank * batch_size).take(_if(is_full, batch_size, 0))
        of_tail = rows.take(_if(is_full, 0, -1)).shard(size, rank)
        return of_batch.concatenate(of_tail)

    return _by_window(source, size * batch_size, own)


def _of_batches(source: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """The batches `rank`, `rank` + `size`, …; those left over are divided by row.

    Where they cannot be (`leftover.rule_of`), the first ranks have one batch more.
    """
    is_fixed = _has_fixed_rows(source)

    def own(batches: tf.data.Dataset, count: tf.Tensor) -> tf.data.Dataset:
        is_full = count == tf.constant(size, tf.int64)
        of_round = batches.take(_if(is_full, -1, 0)).shard(size, rank)
        tail = batches.take(_if(is_full, 0, -1))
        if is_fixed:
            return of_round.concatenate(tail.shard(size, rank))
        is_even = leftover.are_even(batches)
        whole = tail.take(_if(is_even, 0, -1)).shard(size, rank)
        cut = tail.take(_if(is_even, -1, 0)).unbatch().shard(size, rank)
        return of_round.concatenate(cut.batch(2**30)).concatenate(whole)

    return _by_window(source, size, own)


def _by_window(
    source: tf.data.Dataset,
    count: int,
    own: Callable[[tf.data.Dataset, tf.Tensor], tf.data.Dataset],
) -> tf.data.Dataset:
    """`own` of each `count` elements, or fewer at the end, and of their number."""
    is_tuple = type(source.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert
    def of_window(*components: Any) -> tf.data.Dataset:
        rows = tf.data.Dataset.zip(components if is_tuple else components[0])
        return own(rows, rows.cardinality())

    windows, length = source.window(count), finite_or_none(length_of(source))
    if length is not None:
        windows = checked_length(windows, math.ceil(length / count))
    return windows.flat_map(of_window)


def _has_fixed_rows(batches: tf.data.Dataset) -> bool:
    lengths = leftover.lengths_of_spec(batches.element_spec)
    return any(length is not None for length in lengths)


def _if(condition: tf.Tensor, yes: int, no: int) -> tf.Tensor:
    return tf.where(condition, tf.constant(yes, tf.int64), tf.constant(no, tf.int64))
