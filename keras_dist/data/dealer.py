"""Deal batches to the ranks in turn: rank r of N has the batches r, r + N, ….

If the number of batches is not a multiple of N, fewer than N are left at the end of a
pass. There is one rule for them: the first ranks have one each, and in training the
others take part in the step without rows. So every row is trained on once, whatever the
batches are made of.

With `batch="global"` no batch is dealt in training: all ranks have rows of each one. In
evaluations batches are dealt whole.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.data.pipeline import (
    assert_length,
    count_batches,
    finite_or_none,
    join_windows,
    map_batches,
)

# Stands in the error of a pass whose last round has too few batches.
_WRONG_COUNT = (
    "Batches after the last full round: expected to contain others but contained"
)

# A number of rows that no batch has.
_ALL_ROWS = 2**30


@dataclass(frozen=True)
class Dealer:
    """What one rank reads of batches, which the ranks read together.

    In training all ranks make the same steps. A rank without a batch gets a copy of
    another one, with a mark that its rows do not count (`add_mark`). In an evaluation
    it makes a step less.

    Args:
        rank: This rank.
        size: Number of ranks; 1 for batches that are this rank's own.
        is_training: Whether all ranks have to make the same number of steps.
        splits_batches: Whether each batch is a step, of which rank r of N has the rows
            r, r + N, …. Where its tensors differ in length, the first rank has it all.
    """

    rank: int
    size: int
    is_training: bool
    splits_batches: bool = False

    @property
    def per_step(self) -> int:
        """Batches that the ranks together read in a step."""
        return 1 if self.splits_batches else self.size

    def is_marked(self, total: int | None, *, is_resumed: bool) -> bool:
        """Return True if each batch of the data comes with a mark.

        `total` is the number of batches, `None` for infinite data; in the rest of a
        pass that is resumed another number may be left over.
        """
        if self.splits_batches:
            return True
        if self.size == 1 or not self.is_training or total is None:
            return False
        return is_resumed or total % self.size > 0

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
    ) -> tuple[Any, Any] | None:
        """Take this rank's part of a step of `count` batches; `None` if it has none.

        `batch_at` makes one of them, and is called only for the one that is needed.
        Beside the rows, return whether they count.
        """
        has_batch = self.rank < count
        if not count or not (has_batch or self.is_training):
            return None
        if self.splits_batches:
            return take_local_rows(batch_at(0), self.rank, self.size)
        return batch_at(min(self.rank, count - 1)), has_batch

    def deal(self, dataset: tf.data.Dataset, *, is_marked: bool) -> tf.data.Dataset:
        """Read this rank's batches of a data set that is not of unknown length.

        Each rank reads all batches of a round, to the end of the data: a rank that
        stopped before it would cut a cache in it short (see `Source`).
        """
        length = count_batches(dataset)
        total = finite_or_none(length)

        def split(batch: Any) -> Any:
            return add_mark(*take_local_rows(batch, self.rank, self.size))

        if self.splits_batches:
            local = map_batches(dataset, split)
            return local if total is None else assert_length(local, total)
        if length == math.inf:
            return dataset.shard(self.size, self.rank)
        assert total is not None  # data of unknown length is read by `StreamReader`
        if self.size == 1:
            return assert_length(dataset, total)
        left_over = total % self.size

        def own(batches: tf.data.Dataset, count: tf.Tensor) -> tf.data.Dataset:
            # `window` takes an error at the end of the data for the end itself.
            is_right = tf.equal(count, self.size) | tf.equal(count, left_over)
            check = tf.debugging.Assert(is_right, [_WRONG_COUNT, count])
            with tf.control_dependencies([check]):
                index = tf.identity(tf.constant(self.rank, tf.int64))
                index = tf.minimum(index, count - 1) if is_marked else index
            batch = batches.skip(index).take(1)
            if not is_marked:
                return batch
            return map_batches(batch, lambda b: add_mark(b, self.rank < count), None)

        # A window is read to its end before a batch of it is.
        return assert_length(
            join_windows(dataset, self.size, own), self.num_steps(total)
        )


def add_mark(batch: Any, has_rows: Any) -> tuple[Any, Any]:
    """Put a mark beside a batch: a number in an array of one, 0 if no row counts.

    A rank that has no batch in a step that others make gets a copy of another rank's.
    """
    if tf.is_tensor(has_rows):
        return batch, tf.cast(tf.reshape(has_rows, [1]), tf.int32)
    return batch, np.array([has_rows], "int32")


def is_mark(leaf: Any) -> bool:
    """Return True if a tensor beside a batch of a data set may be its mark."""
    is_tensor = tf.is_tensor(leaf) and leaf.dtype == tf.int32
    return is_tensor and leaf.shape.as_list() == [1]


def take_local_rows(batch: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Take one rank's rows of a batch, and tell whether they count.

    Where it has none, it gets the first row, which does not count. If the tensors of
    the batch differ in length, all ranks get all of it, and it counts on the first one.
    A number beside the rows goes whole to every rank.

    Args:
        batch: Arrays or tensors, in any structure.
        rank: The rank.
        size: Number of ranks.

    Returns:
        The rows, and whether they count: in a graph a tensor.

    >>> take_local_rows(np.arange(5), 1, 2), take_local_rows(np.arange(1), 1, 2)
    ((array([1, 3]), True), (array([0]), False))
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if not is_number(leaf)]
    if not leaves or any(isinstance(leaf, tf.SparseTensor) for leaf in leaves):
        return batch, rank == 0
    lengths = [_count_rows(leaf) for leaf in leaves]
    if all(isinstance(length, int) for length in lengths):
        is_even: Any = len(set(lengths)) == 1
        has_rows = rank < lengths[0] if is_even else rank == 0
        span: Any = (0, _ALL_ROWS, 1)
        if is_even:
            span = (rank, _ALL_ROWS, size) if has_rows else (0, 1, 1)
    else:
        lengths = tf.stack(lengths)
        is_even = tf.reduce_all(tf.equal(lengths, lengths[0]))
        has_rows = tf.where(is_even, rank < lengths[0], rank == 0)
        span = tf.constant((rank, _ALL_ROWS, size))
        span = tf.where(has_rows, span, tf.constant((0, 1, 1)))
        span = tf.unstack(tf.where(is_even, span, tf.constant((0, _ALL_ROWS, 1))))

    def own(leaf: Any) -> Any:
        if is_number(leaf):
            return leaf
        if isinstance(leaf, tf.RaggedTensor):
            begin, end, step = span
            rows = tf.range(begin, tf.minimum(end, _length(leaf)), step)
            return tf.gather(leaf, rows)
        rows = leaf[slice(*span)]
        if tf.is_tensor(span[0]):  # then TensorFlow does not know the shape
            shape = tf.TensorShape([None]).concatenate(leaf.shape[1:])
            rows = tf.ensure_shape(rows, shape)
        return rows

    return tf.nest.map_structure(own, batch), has_rows


def is_number(leaf: Any) -> bool:
    """Return True for a part of a batch without rows: a number, or `None`."""
    shape = getattr(leaf, "shape", ())
    return getattr(shape, "rank", len(shape) if isinstance(shape, tuple) else 1) == 0


def _length(leaf: Any) -> tf.Tensor:
    is_ragged = isinstance(leaf, tf.RaggedTensor)
    return tf.cast(leaf.nrows(), tf.int32) if is_ragged else tf.shape(leaf)[0]


def _count_rows(leaf: Any) -> Any:
    """Return the length of the first axis: an integer if it is known, else a tensor."""
    known = None if isinstance(leaf, tf.RaggedTensor) else leaf.shape[0]
    return _length(leaf) if known is None else int(known)
