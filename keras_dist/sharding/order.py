"""Which rows, or batches, of the user's data a rank reads at a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.sharding.feed import Split
from keras_dist.sharding.rows import left_out_rows, steps_of_rows


@dataclass(frozen=True)
class Order:
    """The order in which rows are dealt.

    It is one permutation a pass, a function of `seed` and the number of the pass: the
    same on every rank, each row once a pass, whatever the number of ranks.

    Args:
        num_rows: Of all ranks.
        batch_size: Rows of one rank's batch.
        rank: This rank.
        size: Number of ranks.
        shuffle: `True`, `False`, or `"batch"` to shuffle inside global batches only.
        seed: Of the permutations, the same on all ranks.
    """

    num_rows: int
    batch_size: int
    rank: int
    size: int
    shuffle: bool | str
    seed: int

    @property
    def steps_of_pass(self) -> int:
        """Steps in which all rows are read once."""
        sizes = {"batch_size": self.batch_size, "size": self.size}
        return steps_of_rows(self.num_rows, **sizes)

    def of_pass(self, number: Any) -> Any:
        """Rows that all ranks read in one pass, in their order; a tensor."""
        rows = tf.range(self.num_rows, dtype=tf.int64)
        if self.shuffle and self.shuffle != "batch":
            rows = self._permuted(rows, number)
        sizes = {"batch_size": self.batch_size, "size": self.size}
        return rows[: self.num_rows - left_out_rows(self.num_rows, **sizes)]

    def of_batch(self, rows: Any, number: Any, step: Any) -> Any:
        """Of the rows of a pass, those that this rank reads at one of its steps."""
        in_all = self.batch_size * self.size
        together = rows[step * in_all : (step + 1) * in_all]
        if self.shuffle == "batch":
            together = self._permuted(together, number * self.steps_of_pass + step)
        return together[self.rank :: self.size]

    def rows_at(self, step: int) -> np.ndarray:
        """Rows that this rank reads at a step, counted from the beginning of epoch 0.

        >>> order = Order(7, batch_size=2, rank=1, size=2, shuffle=False, seed=0)
        >>> [order.rows_at(step).tolist() for step in range(3)]
        [[1, 3], [5], [1, 3]]
        """
        with tf.device("CPU:0"):  # where the data set draws its random numbers
            number, place = (
                tf.constant(n, tf.int64) for n in divmod(step, self.steps_of_pass)
            )
            return self.of_batch(self.of_pass(number), number, place).numpy()

    def _permuted(self, rows: Any, number: Any) -> Any:
        return tf.random.experimental.stateless_shuffle(rows, [self.seed, number])


def batches_at(
    step: int, *, total: int | None, split: Split, is_dealt: bool
) -> Sequence[int]:
    """Batches of the user's data that a rank reads at a step of a pass.

    Args:
        step: Counted from the beginning of the pass.
        total: Batches of a pass of all ranks, where that is known.
        split: How data is divided.
        is_dealt: Whether batches are dealt in turn, or all are this rank's.

    >>> [batches_at(n, total=5, split=Split(1, 2), is_dealt=True) for n in (0, 1, 2)]
    [[1], [3], [4]]
    """
    if not is_dealt or split.size == 1:
        return [step]
    begin = step * split.size
    if total is not None and begin + split.size > total:
        return list(range(begin, total))  # whose rows are dealt
    return [begin + split.rank]
