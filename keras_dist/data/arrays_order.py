"""Which rows, or batches, of the user's data one rank reads at a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.data.arrays_schedule import EpochSchedule, either
from keras_dist.data.feed import ShardSpec


@dataclass(frozen=True)
class Order:
    """The order in which the rows are read: one permutation for each pass.

    The permutation is a function of `seed` and the number of the pass alone. So it is
    the same on every rank and for every number of ranks.

    Args:
        schedule: Which part of which pass is read in which epoch.
        rank: This rank.
        shuffle: `True`, `False`, or `"batch"` to shuffle inside global batches only.
        seed: Seed of the permutations, the same on all ranks.
    """

    schedule: EpochSchedule
    rank: int
    shuffle: bool | str
    seed: int

    def rows_of_pass(self, pass_index: Any) -> Any:
        """Indices of the rows that all ranks read in one pass, in their order.

        Args:
            pass_index: Number of the pass, from 0 at the beginning of the schedule; an
                int64 tensor.

        Returns:
            An int64 tensor of shape `(rows,)`.
        """
        schedule = self.schedule
        rows = tf.range(schedule.num_rows, dtype=tf.int64)
        if self.shuffle and self.shuffle != "batch":
            rows = self._permuted(rows, schedule.first_pass + pass_index)
        is_first = tf.equal(pass_index, 0)
        begin = tf.where(is_first, schedule.row, 0)
        end_of_first, end = schedule.end_of_pass(schedule.row), schedule.end_of_pass(0)
        return rows[begin : tf.where(is_first, end_of_first, end)]

    def rows_of_batch(self, rows: Any, pass_index: Any, step: Any) -> Any:
        """Indices of the rows that this rank reads at one step of a pass.

        Args:
            rows: What `rows_of_pass(pass_index)` returns.
            pass_index: Number of the pass, from 0 at the beginning of the schedule.
            step: Number of the step, from 0 at the beginning of `rows`.
        """
        schedule = self.schedule
        global_size = schedule.global_batch_size
        global_batch = rows[step * global_size : (step + 1) * global_size]
        if self.shuffle == "batch":
            is_first = tf.equal(pass_index, 0)
            before = tf.where(is_first, schedule.row // global_size, 0)
            pass_number = schedule.first_pass + pass_index
            number = pass_number * schedule.steps_per_pass + step
            global_batch = self._permuted(
                global_batch, number + tf.cast(before, tf.int64)
            )
        return global_batch[self.rank :: schedule.size]

    def rows_at(self, epoch: int, step: int) -> np.ndarray:
        """Indices of the rows that this rank reads at a step of an epoch.

        Args:
            epoch: Number of an epoch of the schedule.
            step: Number of the step, from 0 where this training began the epoch.

        >>> schedule = EpochSchedule(7, batch_size=2, size=2, steps=2, first_steps=2)
        >>> order = Order(schedule, rank=1, shuffle=False, seed=0)
        >>> [order.rows_at(*at).tolist() for at in ((0, 0), (0, 1), (1, 0))]
        [[1, 3], [5], [1, 3]]
        """
        schedule = self.schedule
        step += schedule.steps_before_epoch(epoch, either)
        pass_index = 0
        if step >= schedule.steps_in_first_pass:
            later = step - schedule.steps_in_first_pass
            pass_index, step = divmod(later, schedule.steps_per_pass)
            pass_index += 1
        with tf.device("CPU:0"):  # the data set draws its random numbers there, too
            pass_tensor = tf.constant(pass_index, tf.int64)
            step_tensor = tf.constant(step, tf.int64)
            rows = self.rows_of_pass(pass_tensor)
            return self.rows_of_batch(rows, pass_tensor, step_tensor).numpy()

    def _permuted(self, rows: Any, number: Any) -> Any:
        return tf.random.experimental.stateless_shuffle(rows, [self.seed, number])


def batches_at(
    step: int, *, total: int | None, spec: ShardSpec, is_sharded: bool, skipped: int = 0
) -> Sequence[int]:
    """Indices of the batches of the user's data that a rank reads at a step of a pass.

    They are several where fewer batches are left than there are ranks: the rows of
    these batches are sharded.

    Args:
        step: Number of the step, counted from the beginning of the pass.
        total: Batches of all ranks in a pass; `None` if unknown.
        spec: How data is divided among the ranks.
        is_sharded: Whether batches are sharded round robin; else all belong to this
            rank.
        skipped: Batches of the pass that were read before the training was resumed.

    >>> spec = ShardSpec(rank=1, size=2)
    >>> [batches_at(n, total=5, spec=spec, is_sharded=True) for n in (0, 1, 2)]
    [[1], [3], [4]]
    """
    if not is_sharded or spec.size == 1:
        return [step + skipped]
    begin = step * spec.size + skipped
    if total is not None and begin + spec.size > total:
        return list(range(begin, total))
    return [begin + spec.rank]
