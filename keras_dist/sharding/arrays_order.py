"""Which rows, or batches, of the user's data a rank reads at a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.sharding.arrays_schedule import EpochSchedule, either
from keras_dist.sharding.feed import Split


@dataclass(frozen=True)
class Order:
    """The order in which rows are dealt.

    It is one permutation a pass, a function of `seed` and the number of the pass: the
    same on every rank, each row once a pass, whatever the number of ranks.

    Args:
        schedule: Which part of which pass comes when.
        rank: This rank.
        shuffle: `True`, `False`, or `"batch"` to shuffle inside global batches only.
        seed: Of the permutations, the same on all ranks.
    """

    schedule: EpochSchedule
    rank: int
    shuffle: bool | str
    seed: int

    def of_pass(self, pass_index: Any) -> Any:
        """Rows that all ranks read in one pass, in their order; a tensor.

        Args:
            pass_index: Of the pass in the course, from 0; a tensor of int64.
        """
        schedule = self.schedule
        rows = tf.range(schedule.num_rows, dtype=tf.int64)
        if self.shuffle and self.shuffle != "batch":
            rows = self._permuted(rows, schedule.number + pass_index)
        is_first = tf.equal(pass_index, 0)
        begin = tf.where(is_first, schedule.row, 0)
        return rows[
            begin : tf.where(is_first, schedule.end(schedule.row), schedule.end(0))
        ]

    def of_batch(self, rows: Any, pass_index: Any, step: Any) -> Any:
        """Of the rows of a pass, those that this rank reads at one of its steps."""
        schedule = self.schedule
        in_all = schedule.batch_size * schedule.size
        rows_of_all = rows[step * in_all : (step + 1) * in_all]
        if self.shuffle == "batch":
            before = tf.where(tf.equal(pass_index, 0), schedule.row // in_all, 0)
            number = (schedule.number + pass_index) * schedule.in_a_pass + step
            rows_of_all = self._permuted(
                rows_of_all, number + tf.cast(before, tf.int64)
            )
        return rows_of_all[self.rank :: schedule.size]

    def rows_at(self, epoch: int, step: int) -> np.ndarray:
        """Rows that this rank reads at a step of an epoch that runs now.

        >>> schedule = EpochSchedule(7, batch_size=2, size=2, steps=2, first_steps=2)
        >>> order = Order(schedule, rank=1, shuffle=False, seed=0)
        >>> [order.rows_at(*at).tolist() for at in ((0, 0), (0, 1), (1, 0))]
        [[1, 3], [5], [1, 3]]
        """
        schedule = self.schedule
        step += schedule.begin(epoch, either)
        pass_index = 0
        if step >= schedule.in_first_pass:
            pass_index, step = divmod(step - schedule.in_first_pass, schedule.in_a_pass)
            pass_index += 1
        with tf.device("CPU:0"):  # where the data set draws its random numbers
            now, then = tf.constant(pass_index, tf.int64), tf.constant(step, tf.int64)
            return self.of_batch(self.of_pass(now), now, then).numpy()

    def _permuted(self, rows: Any, number: Any) -> Any:
        return tf.random.experimental.stateless_shuffle(rows, [self.seed, number])


def batches_at(
    step: int, *, total: int | None, split: Split, is_sharded: bool, skipped: int = 0
) -> Sequence[int]:
    """Batches of the user's data that a rank reads at a step of a pass.

    Args:
        step: Counted from the beginning of the pass.
        total: Batches of a pass of all ranks, where that is known.
        split: How data is divided.
        is_sharded: Whether batches are dealt in turn, or all are this rank's.
        skipped: Batches of the pass that were read before the training went on.

    >>> [batches_at(n, total=5, split=Split(1, 2), is_sharded=True) for n in (0, 1, 2)]
    [[1], [3], [4]]
    """
    if not is_sharded or split.size == 1:
        return [step + skipped]
    begin = step * split.size + skipped
    if total is not None and begin + split.size > total:
        return list(range(begin, total))  # whose rows are dealt
    return [begin + split.rank]
