"""Deal batches to the ranks in turn: rank r of N has the batches r, r + N, ….

If the number of batches is not a multiple of N, fewer than N are left at the end of a
pass: the *tail*. `Tail` is the one place that decides what a rank does with them, for
data sets (`round_robin`), sequences (`sequence`) and streams (`stream`).

With `batch="global"` no batch is dealt in training: all ranks have rows of each one, by
the rule `"rows"`. In evaluations batches are dealt whole; where each reads only some of
them (`validation_steps`), `in_turns` deals those of each evaluation.
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
            the batches are read. `"rows"`: every batch is a step of its own, of which
            each rank has the rows r, r + N, …; where its tensors differ in length, the
            first rank has all of it.
        rank: This rank.
        size: Number of ranks.
        is_training: Whether all ranks have to make the same number of steps.
        class_weight: With the rule `"rows"`, weights of classes, which `rows_of` turns
            into weights of rows: Keras would take a mark for the targets.
    """

    rule: str
    rank: int
    size: int
    is_training: bool
    class_weight: dict[int, float] | None = None

    @property
    def per_step(self) -> int:
        """Batches that all ranks together read in a step."""
        return 1 if self.rule == "rows" else self.size

    @property
    def rows_needed(self) -> int:
        """Rows that a tail must have for this rank to have one of them."""
        return self.size if self.is_training else self.rank + 1

    def is_marked(self, count: int | None, *, is_resumed: bool = False) -> bool:
        """Tell whether each batch of the data comes with a mark (`marked`).

        `count` is the number of batches in the tail, `None` if unknown; the rest of a
        pass that is resumed may have another tail.
        """
        if self.rule == "rows":
            return True
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

    def rows_of(self, batch: Any) -> tuple[Any, Any]:
        """Take this rank's rows of a batch, and tell whether they count.

        Where it has none, it gets the first row, which does not count. In a graph the
        second value is a tensor.
        """
        return own_rows(self.weighted(batch), self.rank, self.size)

    def weighted(self, batch: Any) -> Any:
        """Add the weights of the rows' classes to a batch `(x, y)`, if there are any.

        Raises:
            ValueError: If there are weights of rows already, or several targets.
        """
        if not self.class_weight:
            return batch
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        if sample_weight is not None or y is None or keras.tree.is_nested(y):
            raise ValueError(
                "`class_weight` needs batches `(x, y)` with one target. Received: a "
                f"batch of type {type(batch).__name__} with "
                f"{'weights of rows' if sample_weight is not None else 'other targets'}"
                ". Pass the weights of the rows with the batches instead."
            )
        return x, y, weights_of_classes(y, self.class_weight)

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
        if count == 0 or self.rule == "rows":
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
    if tail.rule == "rows":
        return _by_rows(dataset, tail)
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


def _by_rows(dataset: tf.data.Dataset, tail: Tail) -> tf.data.Dataset:
    """Take one rank's rows of every batch, each with a mark."""
    is_tuple = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert
    def own_rows(*batch: Any) -> Any:
        return marked(*tail.rows_of(batch if is_tuple else batch[0]))

    return dataset.map(own_rows, tf.data.AUTOTUNE, deterministic=True)


def weights_of_classes(y: Any, class_weight: dict[int, float]) -> Any:
    """Return the weight of each row's class, as Keras computes it.

    Args:
        y: Classes of shape `(rows,)` or `(rows, 1)`, or one-hot `(rows, classes)`: an
            array, or a tensor of a data set.
        class_weight: Weights of classes; that of another class is 1.

    Returns:
        Of shape `(rows,)`: for an array one of Keras's float type; for a tensor one of
        float32, in which Keras weighs data sets.
    """
    if tf.is_tensor(y):
        of_classes = [class_weight.get(c, 1.0) for c in range(max(class_weight) + 1)]
        if y.shape.rank is not None and y.shape.rank > 1:
            is_one_hot = y.shape[-1] is None or y.shape[-1] > 1
            y = tf.argmax(y, axis=-1) if is_one_hot else tf.squeeze(y, axis=-1)
        if y.dtype.is_floating:
            y = tf.round(y)
        return tf.gather(tf.constant(of_classes, tf.float32), tf.cast(y, tf.int32))
    classes = np.asarray(y)
    if classes.ndim > 1 and classes.shape[-1] != 1:
        classes = classes.argmax(axis=-1)
    classes = np.round(classes.reshape(len(classes))).astype("int32")
    weights = [class_weight.get(int(found), 1.0) for found in classes]
    return np.asarray(weights, dtype=keras.config.floatx())


def in_turns(
    dataset: tf.data.Dataset, *, steps: int, rank: int, size: int
) -> tf.data.Dataset:
    """Deal the batches of evaluations that each read `steps` batches.

    As in Keras, an evaluation goes on in the data where the one before it ended. Its
    batches are dealt in turn, and each comes with a mark. All ranks make the same
    number of steps: where fewer batches than ranks are left, a rank without one reads
    the last of them, which does not count.

    Args:
        dataset: The batches, the same on all ranks.
        steps: Batches of all ranks in an evaluation.
        rank: This rank.
        size: Number of ranks.

    >>> data = tf.data.Dataset.range(5)
    >>> own = [in_turns(data, steps=3, rank=rank, size=2) for rank in range(2)]
    >>> [[(int(batch), int(mark[0])) for batch, mark in part] for part in own]
    [[(0, 1), (2, 1), (3, 1)], [(1, 1), (2, 0), (4, 1)]]
    """
    total = finite_or_none(length_of(dataset))

    def place_of(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the number of a batch in its round, and the batches of the round."""
        number = index % steps
        end = steps if total is None else tf.minimum(total - index + number, steps)
        begin = number - number % size  # of a round of one batch for each rank
        in_round = tf.minimum(end - begin, size)
        return number - begin, in_round

    @tf.autograph.experimental.do_not_convert
    def is_read(index: tf.Tensor, _: Any) -> tf.Tensor:
        place, in_round = place_of(index)
        return tf.equal(place, tf.minimum(in_round - 1, rank))

    @tf.autograph.experimental.do_not_convert
    def with_mark(index: tf.Tensor, batch: Any) -> Any:
        _, in_round = place_of(index)
        return marked(batch, rank < in_round)

    own = dataset.enumerate().filter(is_read).map(with_mark)
    if total is None:
        return own
    full, rest = divmod(total, steps)
    return checked_length(own, full * -(-steps // size) + -(-rest // size))


def marked(batch: Any, has_rows: Any) -> tuple[Any, Any]:
    """Put a mark beside a batch: a number in an array of one, 0 if no row counts.

    A rank that has no batch in a step that others make gets a copy of another rank's.
    """
    if tf.is_tensor(has_rows):
        return batch, tf.cast(tf.reshape(has_rows, [1]), tf.int32)
    return batch, np.array([has_rows], "int32")


def is_mark(leaf: Any) -> bool:
    """Tell whether a tensor beside a batch of a data set may be its mark."""
    is_tensor = tf.is_tensor(leaf) and leaf.dtype == tf.int32
    return is_tensor and leaf.shape.as_list() == [1]


def num_rows(batch: Any) -> int:
    """Count the rows in a batch: the length of the first axis of its first array."""
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            return int(leaf.shape[0])
    return 0


def own_rows(batch: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Take one rank's rows of a batch, and tell whether they count.

    Where it has none, it gets the first row, which does not count. If the tensors of
    the batch differ in length, all ranks get all of it, and it counts on the first one.

    Args:
        batch: Arrays or tensors, in any structure.
        rank: The rank.
        size: Number of ranks.

    Returns:
        The rows, and whether they count: in a graph a tensor.

    >>> own_rows(np.arange(5), 1, 2), own_rows(np.arange(1), 1, 2)
    ((array([1, 3]), True), (array([0]), False))
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if any(isinstance(leaf, tf.SparseTensor) for leaf in leaves):
        return batch, rank == 0
    lengths = [_rows_of_leaf(leaf) for leaf in leaves]
    if all(isinstance(length, int) for length in lengths):
        is_even: Any = len(set(lengths)) == 1
        has_rows = rank < lengths[0] if is_even else rank == 0
        span: Any = (0, _ALL_ROWS, 1)
        if is_even:
            span = (rank, _ALL_ROWS, size) if has_rows else (0, 1, 1)
    else:
        lengths = tf.stack([tf.cast(length, tf.int32) for length in lengths])
        is_even = tf.reduce_all(tf.equal(lengths, lengths[0]))
        has_rows = tf.where(is_even, rank < lengths[0], rank == 0)
        span = tf.constant((rank, _ALL_ROWS, size))
        span = tf.where(has_rows, span, tf.constant((0, 1, 1)))
        span = tf.unstack(tf.where(is_even, span, tf.constant((0, _ALL_ROWS, 1))))

    def own(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, tf.RaggedTensor):
            begin, end, step = span
            rows = tf.range(begin, tf.minimum(end, _length(leaf, tf.int32)), step)
            return tf.gather(leaf, rows)
        rows = leaf[slice(*span)]
        if tf.is_tensor(span[0]):  # then TensorFlow does not know the shape
            rows = tf.ensure_shape(rows, [None, *leaf.shape[1:]])
        return rows

    return tf.nest.map_structure(own, batch), has_rows


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


def _length(leaf: Any, dtype: Any = tf.int64) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), dtype)
    return tf.shape(leaf, dtype)[0]


def _rows_of_leaf(leaf: Any) -> Any:
    """Return the length of the first axis: an integer if it is known, else a tensor."""
    known = None if isinstance(leaf, tf.RaggedTensor) else leaf.shape[0]
    return _length(leaf, tf.int32) if known is None else int(known)


def _joined(*leaves: Any) -> Any:
    if leaves[0] is None:
        return None
    if tf.is_tensor(leaves[0]):
        return tf.concat(leaves, axis=0)
    return np.concatenate([np.asarray(leaf) for leaf in leaves])
