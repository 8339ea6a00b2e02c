"""Deal batches to the ranks in turn: rank r of N has the batches r, r + N, ….

If the number of batches is not a multiple of N, fewer than N are left at the end of a
pass. There is one rule for them: the first ranks have one each, and in training the
others take part in the step without rows. So every row is trained on once, whatever the
batches are made of.

With `batch="global"` no batch is dealt in training: all ranks have rows of each one. In
evaluations batches are dealt whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist.data.batch_rows import (
    BatchRows,
    choose,
    num_rows,
    put_beside,
    take_own_rows,
)
from keras_dist.data.pipeline import (
    assert_length,
    count_batches,
    finite_or_none,
    map_batches,
    select,
)


@dataclass(frozen=True)
class Dealer:
    """What one rank reads of batches, which the ranks read together.

    In training all ranks make the same steps. A rank without a batch gets a copy of
    another one, of which no row counts. In an evaluation it makes a step less.

    Args:
        rank: This rank.
        size: Number of ranks; 1 for batches that are this rank's own.
        is_training: Whether all ranks have to make the same number of steps.
        splits_batches: Whether each batch is a step, of which each rank has rows.
            Where its tensors differ in length, the first rank has it all.
        is_copy: Whether this rank has no batch at all in an evaluation, and takes part
            by copies of those of `rank`.
    """

    rank: int
    size: int
    is_training: bool
    splits_batches: bool = False
    is_copy: bool = False

    @property
    def per_step(self) -> int:
        """Batches that the ranks together read in a step."""
        return 1 if self.splits_batches else self.size

    @property
    def puts_numbers(self) -> bool:
        """True if `take` and `deal` put numbers beside each batch (`BatchRows`)."""
        return self.is_training or self.is_copy

    def num_steps(self, total: int) -> int:
        """Count this rank's steps of `total` batches.

        >>> [Dealer(rank, 3, is_training=True).num_steps(4) for rank in range(3)]
        [2, 2, 2]
        >>> [Dealer(rank, 3, is_training=False).num_steps(4) for rank in range(3)]
        [2, 1, 1]
        """
        if self.is_training:
            return -(-total // self.per_step)
        return len(range(self.rank, total, self.size))

    def take(
        self, count: int, batch_at: Callable[[int], Any]
    ) -> tuple[Any, BatchRows] | None:
        """Take this rank's part of a step of `count` batches; `None` if it has none.

        `batch_at` makes one of them, and is called only for the one that is needed.
        """
        has_batch = self.rank < count
        if not count or not (has_batch or self.is_training):
            return None
        if self.splits_batches:
            return take_own_rows(batch_at(0), self.rank, self.size)
        batch = batch_at(min(self.rank, count - 1))
        return batch, self._count(batch, has_batch)

    def _count(self, batch: Any, has_batch: Any) -> BatchRows:
        """Return the rows of a batch that is dealt whole."""
        rows = num_rows(batch)
        if self.size == 1:
            return BatchRows(rows, 0, rows)
        return BatchRows(0 if self.is_copy else choose(has_batch, rows, 0))

    def put_numbers(self, batch: Any, has_batch: Any = True) -> Any:
        """Return this rank's rows of a batch that was read, with their `BatchRows`."""
        if self.splits_batches:
            return put_beside(*take_own_rows(batch, self.rank, self.size))
        return put_beside(batch, self._count(batch, has_batch))

    def deal(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Read this rank's batches of a data set that is not of unknown length.

        Each rank reads all batches of a round, to the end of the data: a rank that
        stopped before it would cut a cache in it short (see `Source`).
        """
        total = finite_or_none(count_batches(dataset))
        dataset = dataset if total is None else assert_length(dataset, total)
        if self.splits_batches or (self.size == 1 and self.puts_numbers):
            return map_batches(dataset, self.put_numbers)
        # In the last round, this rank may have a copy of the last batch.
        copied = -1
        if total is not None and self.is_training:
            copied = total - 1 if 0 < total % self.size <= self.rank else -1

        def is_own(number: tf.Tensor) -> tf.Tensor:
            is_dealt = tf.equal(number % self.size, self.rank)
            return is_dealt | tf.equal(number, copied)

        def as_given(number: tf.Tensor, batch: Any) -> Any:
            if not self.puts_numbers:
                return batch
            return self.put_numbers(batch, tf.equal(number % self.size, self.rank))

        steps = tf.data.INFINITE_CARDINALITY if total is None else self.num_steps(total)
        return assert_length(select(dataset, is_own, as_given), steps)
