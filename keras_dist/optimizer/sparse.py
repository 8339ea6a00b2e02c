"""Sparse gradients, as of an `Embedding`: only few rows are not zero."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, mixin
from keras_dist.optimizer.nested import leaves, nested_optimizers

# Where a graph begins.
_INPUTS = {"Placeholder", "PlaceholderWithDefault", "IteratorGetNext", "_Arg"}

# Operations whose results are lengths of axes.
_LENGTHS = {"Shape", "ShapeN", "Size"}


class Lookups:
    """Which tables are read for each row of a batch, and which once for all rows.

    The slices of the latter are sums over rows, which the ranks add up. Their indices
    are *marked* until then: index i is -1 - i.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}  # "rows", "batch" or "both", by variable

    def kind_of(self, variable: Any) -> str | None:
        """Name what is read in a table: "rows", "batch", "both"; `None` if unknown."""
        return self._kinds.get(id(variable))

    def mark(self, gradient: Any, variable: Any) -> Any:
        """In a graph, mark the slices that are sums over rows.

        Args:
            gradient: A rank's own gradient; only `tf.IndexedSlices` have slices.
            variable: The variable of the gradient.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        indices = gradient.indices
        is_joined = indices.op.type == "ConcatV2"  # gradients of several lookups
        lookups = list(indices.op.inputs)[:-1] if is_joined else [indices]
        are_of_rows = [_has_rows(lookup) for lookup in lookups]
        if all(are_of_rows):
            # Of a graph around the one in which the slices were marked, too.
            self._kinds.setdefault(id(variable), "rows")
            return gradient
        self._kinds[id(variable)] = "both" if any(are_of_rows) else "batch"
        both = [
            lookup if is_of_rows else -1 - lookup
            for lookup, is_of_rows in zip(lookups, are_of_rows, strict=True)
        ]
        return _with_indices(gradient, tf.concat(both, 0))

    def unmark(self, gradient: Any, variable: Any) -> Any:
        """Return the gradient; marked slices get their own indices back."""
        if not self._is_marked(gradient, variable):
            return gradient
        return _with_indices(gradient, _unmark(gradient.indices, variable.shape[0]))

    def prepare(self, gradient: Any, variable: Any) -> Any:
        """Return a rank's own gradient; if it is slices, as `add_up` needs them."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not _is_eager(gradient):
            gradient = self.mark(gradient, variable)
        elif self.kind_of(variable) == "batch":
            gradient = _with_indices(gradient, -1 - gradient.indices)
        if not self._is_marked(gradient, variable):
            return gradient
        return _with_indices(gradient, _number(gradient.indices, variable.shape[0]))

    def add_up(
        self, gradient: Any, count: Any, variable: Any, *, rows: Any, name: str
    ) -> Any:
        """Return the slices of all ranks, and add up those that are sums over rows.

        Args:
            gradient: The slices of all ranks; tensors are returned as they are.
            count: How many of them are of this rank.
            variable: The variable of the gradient.
            rows: The rows of this rank's batch, if known.
            name: A fixed name, the same on all ranks.
        """
        kind = self.kind_of(variable)
        if kind == "rows" or not isinstance(gradient, tf.IndexedSlices):
            return gradient
        indices, length = gradient.indices, variable.shape[0]
        if _is_eager(gradient) and kind != "batch":
            own = tf.stack([count, tf.cast(0 if rows is None else rows, count.dtype)])
            sizes = comm.gather_rows(own[tf.newaxis], name=f"{name}.sizes").numpy()
            per_rank = tf.split(indices, sizes[:, 0])
            if not _look_alike([part.numpy() for part in per_rank], sizes[:, 1]):
                self._kinds[id(variable)] = "rows"
                return gradient
            indices = tf.concat([_number(-1 - part, length) for part in per_rank], 0)
        # Each marked index once, with the sum of its slices.
        positions = tf.range(tf.size(indices, tf.int64))
        keys, segments = tf.unique(tf.where(indices < 0, indices, positions))
        number = tf.size(keys)
        values = tf.math.unsorted_segment_sum(gradient.values, segments, number)
        indices = tf.math.unsorted_segment_max(indices, segments, number)
        return tf.IndexedSlices(values, _unmark(indices, length), gradient.dense_shape)

    def _is_marked(self, gradient: Any, variable: Any) -> bool:
        is_slices = isinstance(gradient, tf.IndexedSlices)
        return is_slices and self.kind_of(variable) in ("batch", "both")


def _number(indices: Any, count: int) -> Any:
    """Make the marked indices of one rank tell repetitions apart.

    The second slice of index i, of a table that is read repeatedly for all rows, has to
    be added to the second slice of i of the other ranks.

    Args:
        indices: A vector of indices, also marked ones.
        count: The number of rows of the table.
    """
    indices = tf.cast(indices, tf.int64)
    order = tf.argsort(indices, stable=True)
    ascending = tf.gather(indices, order)
    first = tf.searchsorted(ascending, ascending, out_type=tf.int64)
    repetition = tf.range(tf.size(indices, tf.int64)) - first
    repetition = tf.gather(repetition, tf.math.invert_permutation(order))
    return tf.where(indices < 0, indices - repetition * count, indices)


def _unmark(indices: Any, count: int) -> Any:
    """Undo marks and numbers; `count` is the number of rows of the table."""
    return tf.where(indices < 0, (-1 - indices) % count, indices)


def _look_alike(per_rank: Sequence[np.ndarray], rows: np.ndarray) -> bool:
    """Return True if the indices of the ranks look like one lookup's.

    A step that runs eagerly has no graph to read it from. Words differ between the
    ranks. Positions do not, but their number may, with the longest row of a batch.

    Args:
        per_rank: The indices of each rank.
        rows: The rows of each rank's batch; 0 if they are unknown.
    """
    longest = max(per_rank, key=len)
    if not all((own == longest[: len(own)]).all() for own in per_rank):
        return False
    if len(set(longest.tolist())) == len(longest):
        return True
    # A feature that has the same value in all rows looks the same, too.
    is_equal = len({len(own) for own in per_rank}) == 1
    return is_equal and bool(rows.all() and (len(longest) % rows).any())


def _is_eager(slices: tf.IndexedSlices) -> bool:
    return isinstance(slices.indices, tf.__internal__.EagerTensor)


def _has_rows(indices: Any) -> bool:
    """Return True if the number of indices grows with the rows of the batch.

    It does if they are computed from data, but for numbers: a number has no rows,
    unless it is the length of an axis of rows.
    """
    seen: set[tuple[int, bool]] = set()
    todo = [(indices, False)]
    while todo:
        tensor, is_number = todo.pop()
        is_number = is_number or tensor.shape.rank == 0
        if (id(tensor), is_number) in seen:
            continue
        seen.add((id(tensor), is_number))
        if tensor.dtype in (tf.resource, tf.variant) or _is_other_axis(tensor):
            continue
        if tensor.op.type not in _INPUTS:
            is_number = is_number and tensor.op.type not in _LENGTHS
            todo += [(own, is_number) for own in tensor.op.inputs]
            continue
        outer = _find_captured(tensor)
        if outer is None and not is_number:
            return True
        if not (outer is None or isinstance(outer, tf.__internal__.EagerTensor)):
            todo.append((outer, is_number))  # of the graph around this one
    return False


def _is_other_axis(tensor: Any) -> bool:
    """Return True if a tensor is the length of an axis other than the first one."""
    if tensor.op.type != "StridedSlice" or tensor.op.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(tensor.op.inputs[1])
    rank = tensor.op.inputs[0].op.inputs[0].shape.rank
    if begin is None or tensor.shape.rank != 0:
        return False
    axis = int(begin[0])
    return axis > 0 or (axis < 0 and rank is not None and axis + rank > 0)


def _find_captured(tensor: Any) -> Any:
    """Return what an input of a graph stands for outside; `None` for an argument."""
    for outer, inner in getattr(tensor.graph, "captures", []):
        if inner is tensor:
            return outer
    return None


def is_merged(optimizer: Any) -> bool:
    """Return True if repeated rows are added up before they are sent.

    That changes nothing for an optimizer that computes with gradients only what is
    linear in them, and for those that accumulate, since Keras then adds up whole
    gradients first. Most square each slice, and clip by each slice, too. What an
    optimizer of the user does is not known. Operations on a GPU would add up repeated
    rows in another order each time, and the weights of the ranks drift apart by
    roundings.
    """
    if tf.config.get_visible_devices("GPU"):
        return True
    if not all(map(_is_from_keras, nested_optimizers(optimizer))):
        return False
    inner = leaves(optimizer)  # none before a `MultiOptimizer` is built
    return bool(inner) and all(map(_is_linear, inner))


def _is_linear(leaf: Any) -> bool:
    # Keras cannot divide slices by a loss scale that is a number.
    if leaf.gradient_accumulation_steps or leaf.loss_scale_factor is not None:
        return True
    linear = (keras.optimizers.SGD, keras.optimizers.Lion)
    is_clipped = leaf.clipnorm or leaf.global_clipnorm or leaf.clipvalue
    return leaf.__class__ in linear and not is_clipped


def _is_from_keras(optimizer: Any) -> bool:
    """Return True if the class is Keras's own, and not derived from it by a user."""
    own = optimizer.__class__
    return getattr(keras.optimizers, own.__name__, None) is own


def with_shape(gradient: Any, variable: Any) -> Any:
    """Return a gradient; `tf.IndexedSlices` get the shape of their variable."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.constant(tuple(variable.shape), tf.int64)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def _with_indices(slices: tf.IndexedSlices, indices: Any) -> tf.IndexedSlices:
    return tf.IndexedSlices(slices.values, indices, slices.dense_shape)


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Apply a function to the numbers of a gradient, whole or by rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return function(tf.convert_to_tensor(gradient))
    values = function(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def all_or_none_finite(values: Any) -> Any:
    """Set all values of slices to NaN if one is not finite.

    A `LossScaleOptimizer` looks at one of the slices of a row only.
    """
    is_finite = tf.reduce_all(tf.math.is_finite(values))
    return tf.where(is_finite, values, tf.constant(math.nan, values.dtype))


@contextlib.contextmanager
def add_in_order(optimizer: Any, gradients: Sequence[Any]) -> Iterator[None]:
    """Context manager in which each rank that makes an update gets the same bits.

    TensorFlow's scatter adds a thousand slices and more in several threads, repeated
    rows in any order. The conversion to a whole gradient has one order.

    Args:
        optimizer: The optimizer that makes the update.
        gradients: The gradients of the update, averaged over all ranks.
    """
    has_rows = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    is_repeated = has_rows and comm.size() > 1
    with contextlib.ExitStack() as stack:
        for part in nested_optimizers(optimizer) if is_repeated else []:
            stack.enter_context(mixin.use(part, AddsInOrder))
        yield


class AddsInOrder:
    """Mixin for an optimizer: it adds up slices before it adds them to a variable."""

    def assign_add(self, variable: Any, value: Any) -> None:
        super().assign_add(variable, _to_dense(value))  # type: ignore[misc]

    def assign_sub(self, variable: Any, value: Any) -> None:
        super().assign_sub(variable, _to_dense(value))  # type: ignore[misc]


def _to_dense(value: Any) -> Any:
    is_rows = isinstance(value, tf.IndexedSlices)
    return tf.convert_to_tensor(value) if is_rows else value


def merge(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up repeated rows of a gradient, so that it has each row once."""
    rows, index = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, index, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def gather_slices(slices: tf.IndexedSlices, *, name: str) -> tf.IndexedSlices:
    """Gather the slices of all ranks in rank order; repeated rows stay repeated.

    Args:
        slices: This rank's gradient, of any number of slices, also none.
        name: A fixed name, the same on all ranks.
    """
    return tf.IndexedSlices(
        comm.gather_rows(slices.values, name=f"{name}.values"),
        comm.gather_rows(slices.indices, name=f"{name}.indices"),
        slices.dense_shape,
    )


def sum_slices(slices: tf.IndexedSlices, counts: Any, *, name: str) -> Any:
    """Sum a gradient over all ranks, sent as rows or whole, whichever is smaller.

    Args:
        slices: This rank's gradient, each row once.
        counts: The number of rows of each rank. It is equal on all ranks, so all make
            the same choice.
        name: A fixed name, the same on all ranks.

    Returns:
        A dense tensor: Keras's optimizers would make one of it anyway.
    """
    values, indices = slices.values, slices.indices
    shape = tuple(slices.shape)
    row_bytes = math.prod(shape[1:]) * values.dtype.size
    # A rank receives the rows of all ranks, or in a ring allreduce the whole gradient
    # twice.
    as_rows = tf.reduce_sum(counts) * (row_bytes + indices.dtype.size)
    as_whole = tf.cast(2 * shape[0] * row_bytes, as_rows.dtype)

    def sum_rows() -> Any:
        gathered = gather_slices(slices, name=name)
        total = tf.zeros(shape, values.dtype)
        ends = tf.cumsum(tf.cast(counts, tf.int32))
        begins = tf.concat([[0], ends[:-1]], axis=0)
        # In the order of the ranks, so that all ranks get the same bits.
        for rank in range(comm.size()):
            rows = tf.range(begins[rank], ends[rank])
            total = tf.tensor_scatter_nd_add(
                total,
                tf.gather(gathered.indices, rows)[:, tf.newaxis],
                tf.gather(gathered.values, rows),
            )
        return total

    def sum_whole() -> Any:
        dense = tf.reshape(tf.convert_to_tensor(slices), shape)
        return comm.sum_tensors([dense], name=f"{name}.dense", dtype=values.dtype)[0]

    return tf.cond(as_rows < as_whole, sum_rows, sum_whole)
