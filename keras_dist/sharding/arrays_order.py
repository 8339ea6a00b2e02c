"""Which rows, or batches, of the user's data a rank reads at a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.sharding.arrays_schedule import Course, either
from keras_dist.sharding.feed import Split


@dataclass(frozen=True)
class Order:
    """The order in which rows are dealt.

    It is one permutation a pass, a function of `seed` and the number of the pass: the
    same on every rank, each row once a pass, whatever the number of ranks.

    Args:
        course: Which part of which pass comes when.
        rank: This rank.
        shuffle: `True`, `False`, or `"batch"` to shuffle inside global batches only.
        seed: Of the permutations, the same on all ranks.
    """

    course: Course
    rank: int
    shuffle: bool | str
    seed: int

    def of_pass(self, place: Any) -> Any:
        """Rows that all ranks read in one pass, in their order; a tensor.

        Args:
            place: Of the pass in the course, from 0; a tensor of int64.
        """
        course = self.course
        rows = tf.range(course.num_rows, dtype=tf.int64)
        if self.shuffle and self.shuffle != "batch":
            rows = self._permuted(rows, course.number + place)
        is_first = tf.equal(place, 0)
        begin = tf.where(is_first, course.row, 0)
        return rows[begin : tf.where(is_first, course.end(course.row), course.end(0))]

    def of_batch(self, rows: Any, place: Any, step: Any) -> Any:
        """Of the rows of a pass, those that this rank reads at one of its steps."""
        course = self.course
        in_all = course.batch_size * course.size
        together = rows[step * in_all : (step + 1) * in_all]
        if self.shuffle == "batch":
            before = tf.where(tf.equal(place, 0), course.row // in_all, 0)
            number = (course.number + place) * course.in_a_pass + step
            together = self._permuted(together, number + tf.cast(before, tf.int64))
        return together[self.rank :: course.size]

    def rows_at(self, epoch: int, step: int) -> np.ndarray:
        """Rows that this rank reads at a step of an epoch that runs now.

        >>> course = Course(7, batch_size=2, size=2, steps=2, first_steps=2)
        >>> order = Order(course, rank=1, shuffle=False, seed=0)
        >>> [order.rows_at(*place).tolist() for place in ((0, 0), (0, 1), (1, 0))]
        [[1, 3], [5], [1, 3]]
        """
        course = self.course
        step += course.begin(epoch, either)
        place = 0
        if step >= course.in_first_pass:
            place, step = divmod(step - course.in_first_pass, course.in_a_pass)
            place += 1
        with tf.device("CPU:0"):  # where the data set draws its random numbers
            now, then = tf.constant(place, tf.int64), tf.constant(step, tf.int64)
            return self.of_batch(self.of_pass(now), now, then).numpy()

    def _permuted(self, rows: Any, number: Any) -> Any:
        return tf.random.experimental.stateless_shuffle(rows, [self.seed, number])


def batches_at(
    step: int, *, total: int | None, split: Split, is_dealt: bool, skipped: int = 0
) -> Sequence[int]:
    """Batches of the user's data that a rank reads at a step of a pass.

    Args:
        step: Counted from the beginning of the pass.
        total: Batches of a pass of all ranks, where that is known.
        split: How data is divided.
        is_dealt: Whether batches are dealt in turn, or all are this rank's.
        skipped: Batches of the pass that were read before the training went on.

    >>> [batches_at(n, total=5, split=Split(1, 2), is_dealt=True) for n in (0, 1, 2)]
    [[1], [3], [4]]
    """
    if not is_dealt or split.size == 1:
        return [step + skipped]
    begin = step * split.size + skipped
    if total is not None and begin + split.size > total:
        return list(range(begin, total))  # whose rows are dealt
    return [begin + split.rank]
