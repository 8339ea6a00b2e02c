"""Data sets that are divided among the ranks before their rows are decoded.

What `keras_dist.shard` has divided is known by the data set that it returned. A later
`map`, `batch` or `prefetch` makes a new one, which is followed back to its inputs.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from keras_dist.data.division import own_items
from keras_dist.data.pipeline import (
    before_shuffles,
    by_window,
    checked_length,
    finite_or_none,
    has_cache_in_memory,
    inputs_of,
    length_of,
    lengths_of_spec,
    nodes,
    rows_per_batch,
    take_if,
)
from keras_dist.data.round_robin import Tail, round_robin

# Rows of a rank in a window of rows that come from a cache.
_WINDOW = 64

_BY_FILE = tf.data.experimental.AutoShardPolicy.FILE.value


@dataclass(frozen=True, eq=False)
class Presharded:
    """Division of a data set before its rows were decoded.

    Args:
        by: `"rows"`: rank r of N has the elements r, r + N, …. `"batches"`: it has the
            batches r, r + N, …. `"files"`: as rows, but an element is a file.
            `"source"`: TensorFlow has divided the files that the data is read from.
        batch_size: Rows of one rank's batch; `None` if unknown or if each element is a
            batch.
        rank: The rank that has these elements.
        size: Number of ranks.
        source: The data set before it was divided, the same on all ranks.
        is_global: Whether `batch_size` rows are the batch of all ranks, of which rank r
            has the rows r, r + N, ….
    """

    by: str
    batch_size: int | None
    rank: int
    size: int
    source: tf.data.Dataset
    is_global: bool = False

    @property
    def length(self) -> float | None:
        """Elements of all ranks, `math.inf`, or `None` if unknown."""
        return length_of(self.source)

    @property
    def has_batches(self) -> bool:
        """Tell whether each element is a batch."""
        return self.by == "batches" and self.batch_size is None

    @property
    def is_by_file(self) -> bool:
        """Tell whether each rank has the rows of its own files."""
        return self.by in ("files", "source")

    def facts(self) -> tuple[object, ...]:
        """Return what has to be equal on all ranks."""
        kind = "global" if self.is_global else f"of {self.size} ranks"
        return f"by {self.by}", self.batch_size, kind, self.length

    def compared(self) -> list[tf.data.Dataset]:
        """Return what is compared over the ranks: cheap to read, and not random."""
        if self.by != "source":
            return before_shuffles(self.source)
        return [node for node in nodes(self.source) if not inputs_of(node)]

    def rows_at(self, rank: int, length: int) -> np.ndarray:
        """List the indices of a rank's elements among the first `length`.

        Where the elements are batches, only those of full rounds are listed.
        """
        rows = np.arange(length)
        if self.is_global:
            return rows[rows % (self.batch_size or 1) % self.size == rank]
        if self.by != "batches":
            return rows[own_items(rank, self.size)]
        in_batch = self.batch_size or 1
        tail = length % (in_batch * self.size)
        if tail > (self.size - 1) * in_batch:
            tail = 0  # each rank has a batch, the last one a smaller one
        dealt, rest = rows[: length - tail], rows[length - tail :]
        own = dealt[dealt // in_batch % self.size == rank]
        rest = rest[own_items(rank, self.size)] if self.batch_size else rest[:0]
        return np.concatenate([own, rest])

    def rows_of(self, rank: int, length: int) -> int:
        """Count the elements that `rows_at` lists."""
        return len(self.rows_at(rank, length))


# How each data set was divided that `divided` or `divided_at_source` has returned.
_KNOWN: "weakref.WeakKeyDictionary[tf.data.Dataset, Presharded]"
_KNOWN = weakref.WeakKeyDictionary()


def divided(
    source: tf.data.Dataset,
    *,
    by: str,
    batch_size: int | None,
    rank: int,
    size: int,
    is_global: bool = False,
) -> tf.data.Dataset:
    """Return the elements of one rank, which `presharded_of` recognizes after a `map`.

    `source` has the same elements on all ranks; see `Presharded` for the others.

    >>> rows = tf.data.Dataset.range(7)
    >>> own = [divided(rows, by="rows", batch_size=2, rank=r, size=2) for r in (0, 1)]
    >>> [[int(row) for row in data] for data in own]
    [[0, 2, 4, 6], [1, 3, 5]]
    >>> data = divided(rows, by="batches", batch_size=2, rank=1, size=2)
    >>> [int(row) for row in data]
    [2, 3, 6]
    """
    presharded = Presharded(by, batch_size, rank, size, source, is_global)
    length = finite_or_none(presharded.length)
    own = None if length is None else presharded.rows_of(rank, length)
    if is_global and batch_size is not None:
        dataset = by_window(source, batch_size, lambda rows, _: rows.shard(size, rank))
    elif by != "batches":
        dataset = _every(source, rank, size)
    elif batch_size is not None:
        dataset = _by_batch(source, batch_size, rank, size)
    else:
        is_fixed = any(n is not None for n in lengths_of_spec(source.element_spec))
        tail = Tail("whole" if is_fixed else "either", rank, size, is_training=False)
        dataset = round_robin(source, tail)
        if length is not None and own is not None:
            has_more = tail.has_step(length % size, lambda: None)
            own = None if has_more is None else own + has_more
    if presharded.length == math.inf:
        own = tf.data.INFINITE_CARDINALITY
    if own is not None:
        dataset = checked_length(dataset, own)
    _KNOWN[dataset] = presharded
    return dataset


def divided_at_source(
    dataset: tf.data.Dataset, *, rank: int, size: int
) -> tf.data.Dataset | None:
    """Let TensorFlow divide the files that batches are read from: `shard="source"`.

    TensorFlow looks for what reads files (`TFRecordDataset`, `TextLineDataset`, …) in
    the pipeline, and divides the names before it. If it finds nothing that reads files,
    `None` is returned.
    """
    types = tf.compat.v1.data.get_output_types(dataset)
    shapes = tf.compat.v1.data.get_output_shapes(dataset)
    try:
        own = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=size,
            index=rank,
            output_types=tf.nest.flatten(types),
            output_shapes=tf.nest.flatten(shapes),
            auto_shard_policy=_BY_FILE,
            num_replicas=size,
        )
    except (tf.errors.NotFoundError, tf.errors.UnimplementedError):
        return None
    found = tf.data.experimental.from_variant(own, dataset.element_spec)
    _KNOWN[found] = Presharded("source", None, rank, size, dataset)
    return found


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
        kinds = ", ".join("none" if one is None else f"by {one.by}" for one in found)
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
    length = length_of(dataset)
    inputs = [] if dataset in _KNOWN else inputs_of(dataset)
    if length != math.inf or len(inputs) != 1:
        return length
    return length_before_repeat(inputs[0])


@dataclass(frozen=True)
class Rest:
    """The rest of a pass over presharded data, after some batches.

    Args:
        presharded: How the data was divided.
        data: The batches of this rank, of `batch_size` rows.
        total: Batches of one process in a pass.
    """

    presharded: Presharded
    data: tf.data.Dataset
    batch_size: int
    total: int

    @classmethod
    def of(
        cls, presharded: Presharded, data: tf.data.Dataset, lengths: Sequence[int]
    ) -> "Rest | None":
        """Return `None` if the batches may not be those of one process.

        Each row must have become one row of a batch: none was left out or added after
        the division.
        """
        length = finite_or_none(presharded.length)
        if presharded.is_global and presharded.batch_size:
            # Each element is this rank's rows of a batch, for any number of ranks.
            total = max(lengths)
            return cls(presharded, data, presharded.batch_size, int(total))
        rows = presharded.batch_size or rows_per_batch(data)
        rows = 1 if presharded.has_batches else rows
        if length is None or rows is None or presharded.is_by_file:
            return None
        counts = [presharded.rows_of(rank, length) for rank in range(presharded.size)]
        if list(lengths) == [-(-count // rows) for count in counts]:
            return cls(presharded, data, rows, -(-length // rows))
        if list(lengths) == [count // rows for count in counts]:  # `drop_remainder`
            return cls(presharded, data, rows, length // rows)
        return None

    def steps_after(self, read: int) -> int:
        """Count the steps of all ranks, after `read` batches of all ranks.

        Raises:
            ValueError: If the rest does not begin with a batch of the first rank, and
                the data was divided by batch.
        """
        size = self.presharded.size
        if self.presharded.is_global:
            return self.total - read
        if read % size and self.presharded.by == "batches":
            raise ValueError(
                "The training cannot go on in the middle of an epoch with data that "
                "`shard` has divided by batch: the batches that are left do not begin "
                f"with one of the first rank. Received: {read} batches that were "
                f"read, and {size} ranks. Start as many ranks as before, "
                'or pass by="rows".'
            )
        return min(self.batches_after(read, rank) for rank in range(size))

    def batches_after(self, read: int, rank: int) -> int:
        """Count the batches of one rank, after `read` batches of all ranks."""
        length = finite_or_none(self.presharded.length) or 0
        rows = self.presharded.rows_of(rank, length) - self._rows_read(read, rank)
        return rows // self.batch_size if self._drops else -(-rows // self.batch_size)

    def after(self, read: int, rank: int) -> tf.data.Dataset:
        """Return the batches of one rank, after `read` batches of all ranks."""
        if read % self.presharded.size == 0:
            return self.data.skip(read // self.presharded.size)
        rows = self.data.unbatch().skip(self._rows_read(read, rank))
        return rows.batch(self.batch_size, drop_remainder=self._drops)

    @property
    def _drops(self) -> bool:
        return self.total * self.batch_size < (self.presharded.length or 0)

    def _rows_read(self, read: int, rank: int) -> int:
        return self.presharded.rows_of(rank, read * self.batch_size)


def _every(source: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """Select the elements `rank`, `rank` + `size`, …."""
    if not has_cache_in_memory(source):
        return source.shard(size, rank)
    # `shard` ends with this rank's last element, and would cut the cache short.
    return by_window(source, _WINDOW * size, lambda rows, _: rows.shard(size, rank))


def _by_batch(
    source: tf.data.Dataset, batch_size: int, rank: int, size: int
) -> tf.data.Dataset:
    """Select every `size`-th batch, and every `size`-th row of the last ones."""
    without_last = tf.constant((size - 1) * batch_size, tf.int64)

    def own(rows: tf.data.Dataset, count: tf.Tensor) -> tf.data.Dataset:
        is_full = count > without_last
        of_batch = take_if(rows.skip(rank * batch_size), is_full, batch_size)
        return of_batch.concatenate(take_if(rows, ~is_full).shard(size, rank))

    return by_window(source, size * batch_size, own)
