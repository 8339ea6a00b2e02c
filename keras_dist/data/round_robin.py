"""Deal batches to the ranks in turn: rank r of N has the batches r, r + N, ….

If the number of batches is not a multiple of N, fewer than N are left at the end of a
pass: the *tail*. `Tail` is the one place that decides what a rank does with them, for
data sets (`round_robin`), sequences (`sequence`) and streams (`stream`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.division import own_items
from keras_dist.data.pipeline import (
    by_window,
    checked_length,
    finite_or_none,
    length_of,
    take_if,
)

# In the plan, by rule.
_IN_WORDS = {
    "cut": "cut by rows",
    "whole": "whole to some ranks, the others make a step without rows",
    "drop": "left out",
    "either": "cut by rows, or whole where their tensors differ in length",
}

# Stands in the error of a pass whose last round has too few batches.
_TAIL = "Batches after the last full round: expected to contain others but contained"

# A number of rows that no batch has.
_ALL_ROWS = 2**30


@dataclass(frozen=True)
class Tail:
    """One rank's step of the tail: fewer batches than ranks, at the end of a pass.

    In training, all ranks make the same number of steps. So a tail whose rows are
    divided is left out if it has fewer rows than there are ranks; and of whole batches,
    a rank without one gets a copy of another rank's, with a mark that its rows do not
    count. In an evaluation, such a rank makes a step less.

    Args:
        rule: `"cut"`: the rows are divided. `"whole"`: the first ranks have a batch
            each. `"drop"`: it is left out. `"either"`: cut or whole, which shows when
            the batches are read.
        rank: This rank.
        size: Number of ranks.
        is_training: Whether all ranks have to make the same number of steps.
    """

    rule: str
    rank: int
    size: int
    is_training: bool

    @property
    def rows_needed(self) -> int:
        """Rows that a tail must have for this rank to have one of them."""
        return self.size if self.is_training else self.rank + 1

    def is_marked(self, count: int | None, *, is_resumed: bool = False) -> bool:
        """Tell whether each batch of the data comes with a mark (`marked`).

        `count` is the number of batches in the tail, `None` if unknown; the rest of a
        pass that is resumed may have another tail.
        """
        if self.size == 1 or not self.is_training or self.rule in ("cut", "drop"):
            return False
        return count != 0 or is_resumed

    def resolved(self, batches: Sequence[Any]) -> "Tail":
        """Decide between cut and whole where the batches have to be seen for it."""
        if self.rule != "either":
            return self
        return replace(self, rule="cut" if all(map(_is_even, batches)) else "whole")

    def has_step(self, count: int, num_rows: Callable[[], int | None]) -> bool | None:
        """Tell whether this rank makes a step of a tail; `None` if unknown.

        The rows of its `count` batches are counted only if they matter.
        """
        if count == 0 or self.rule == "drop":
            return False
        if self.rule == "whole":
            return count > (0 if self.is_training else self.rank)
        rows = num_rows()
        return None if rows is None else rows >= self.rows_needed

    def batch(self, count: int, batch_at: Callable[[int], Any]) -> tuple[Any, bool]:
        """Make this rank's batch of a tail of which it makes a step.

        `batch_at` makes one of its `count` batches, and is called only for those that
        are needed. Beside the batch, tell whether its rows count.
        """
        if self.rule == "whole":
            return batch_at(self._index(count)), self.rank < count
        batches = [batch_at(index) for index in range(count)]
        return rows_of_batches(batches, rank=self.rank, size=self.size), True

    def dataset(
        self, batches: tf.data.Dataset, is_tail: tf.Tensor, count: int | None
    ) -> list[tuple[tf.data.Dataset, tf.Tensor]]:
        """Make this rank's batch of a tail inside of a `tf.data` pipeline.

        `count` is needed in training only. The data sets that are returned hold at most
        one batch together; beside each stands whether its rows count.
        """
        if self.rule == "drop":
            return []
        if self.rule == "cut":
            return [self._cut(batches, is_tail)]
        if self.rule == "whole":
            return [self._whole(batches, is_tail, count)]
        is_even = _are_even(batches)
        return [
            self._cut(batches, is_tail & is_even),
            self._whole(batches, is_tail & ~is_even, count),
        ]

    def in_words(self, count: int | None) -> str:
        """Say in the plan what happens to a tail; `count` is `None` if unknown."""
        if count == 0:
            return ""
        batches = {None: "the last batches", 1: "1 batch"}.get(
            count, f"{count} batches"
        )
        return f"{batches}: {_IN_WORDS[self.rule]}"

    def _index(self, count: int) -> int:
        """Choose one of `count` whole batches, perhaps to be copied."""
        return min(self.rank, count - 1)

    def _cut(self, batches: tf.data.Dataset, condition: tf.Tensor) -> Any:
        lengths = batches.map(lambda *batch: _length(keras.tree.flatten(batch)[0]))
        num_rows = lengths.reduce(tf.constant(0, tf.int64), tf.add)
        used = take_if(batches, condition & (num_rows >= self.rows_needed)).unbatch()
        return used.shard(self.size, self.rank).batch(_ALL_ROWS), tf.constant(True)

    def _whole(
        self, batches: tf.data.Dataset, condition: tf.Tensor, count: int | None
    ) -> Any:
        batches = take_if(batches, condition)
        if not self.is_training:
            return batches.shard(self.size, self.rank), tf.constant(True)
        count = count or 0
        one = batches.skip(self._index(max(count, 1))).take(1)
        return one, tf.constant(self.rank < count)


def round_robin(
    dataset: tf.data.Dataset, tail: Tail, *, is_marked: bool = False
) -> tf.data.Dataset:
    """Read one rank's batches of a `tf.data.Dataset`, the same on all ranks.

    Each rank reads all batches of a round, to the end of the data: a rank that stopped
    before it would cut a cache in `dataset` short (see `source.first_batches`).
    """
    length = length_of(dataset)
    if length == math.inf:
        return dataset.shard(tail.size, tail.rank)
    known = finite_or_none(length)
    if tail.size == 1 and known is not None:
        return checked_length(dataset, known)
    in_tail = None if known is None else known % tail.size
    is_tuple = type(dataset.element_spec) is tuple

    def with_mark(batches: tf.data.Dataset, has_rows: Any) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def mark(*batch: Any) -> Any:
            return marked(batch if is_tuple else batch[0], has_rows)

        return batches.map(mark) if is_marked else batches

    def own(batches: tf.data.Dataset, count: tf.Tensor) -> tf.data.Dataset:
        is_full = tf.equal(count, tail.size)
        checks = []
        if in_tail is not None:
            # `window` takes an error at the end of the data for the end itself.
            is_right = is_full | tf.equal(count, in_tail)
            checks = [tf.debugging.Assert(is_right, [_TAIL, count])]
        with tf.control_dependencies(checks):
            full = take_if(batches, is_full).shard(tail.size, tail.rank)
        found = with_mark(full, tf.constant(True))
        for batch, has_rows in tail.dataset(batches, ~is_full, in_tail):
            found = found.concatenate(with_mark(batch, has_rows))
        return found

    return by_window(dataset, tail.size, own)


def marked(batch: Any, has_rows: Any) -> tuple[Any, Any]:
    """Put a mark beside a batch: a number in an array of one, 0 if no row counts.

    A rank that has no batch in a step that others make gets a copy of another rank's.
    """
    if tf.is_tensor(has_rows):
        return batch, tf.cast(tf.reshape(has_rows, [1]), tf.int32)
    return batch, np.array([has_rows], "int32")


def num_rows(batch: Any) -> int:
    """Count the rows in a batch: the length of the first axis of its first array."""
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            return int(leaf.shape[0])
    return 0


def rows_of_batches(batches: Sequence[Any], *, rank: int, size: int) -> Any:
    """Join the rows `rank`, `rank` + `size`, … of some batches to one batch.

    >>> batches = [np.arange(3), np.arange(3, 5)]
    >>> [rows_of_batches(batches, rank=r, size=2) for r in range(2)]
    [array([0, 2, 4]), array([1, 3])]
    """
    slices, begin = [], 0
    for batch in batches:
        rows = own_items((rank - begin) % size, size)
        slices.append(
            keras.tree.map_structure(
                lambda leaf, rows=rows: None if leaf is None else leaf[rows], batch
            )
        )
        begin += num_rows(batch)
    if len(slices) == 1:
        return slices[0]
    return keras.tree.map_structure(_joined, *slices)


def have_one_length(shapes: Sequence[Sequence[Any]]) -> bool:
    """Tell whether arrays of these shapes have the same number of rows."""
    return all(map(len, shapes)) and len({shape[0] for shape in shapes}) <= 1


def _is_even(batch: Any) -> bool:
    """Tell whether all tensors of a batch have the same length.

    >>> _is_even((np.zeros((3, 2)), np.zeros(3))), _is_even((np.ones(3), np.ones(2)))
    (True, False)
    """
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return have_one_length([leaf.shape for leaf in leaves])


def _are_even(batches: tf.data.Dataset) -> tf.Tensor:
    """Tell the same of all batches of a data set, as a tensor."""

    @tf.autograph.experimental.do_not_convert
    def is_even(*batch: Any) -> tf.Tensor:
        lengths = tf.stack([_length(leaf) for leaf in tf.nest.flatten(batch)])
        return tf.reduce_all(tf.equal(lengths, lengths[0]))

    return batches.map(is_even).reduce(True, tf.logical_and)


def _length(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    return tf.shape(leaf, tf.int64)[0]


def _joined(*leaves: Any) -> Any:
    if leaves[0] is None:
        return None
    if tf.is_tensor(leaves[0]):
        return tf.concat(leaves, axis=0)
    return np.concatenate([np.asarray(leaf) for leaf in leaves])
