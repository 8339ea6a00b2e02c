"""Slices that are sums over the rows of a batch, as of a table of positions.

A table of words is read for each row of a batch, and each of its slices is of one row.
A table of positions is read once for all rows: one process gets one slice a position,
a sum over all rows of the batch, which the ranks have to add up. Between the functions
here, the index of such a slice is negative: -1 - index.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import comm

# Where a graph begins.
_INPUTS = {"Placeholder", "PlaceholderWithDefault", "IteratorGetNext", "_Arg"}

# Operations whose results are lengths of axes.
_LENGTHS = {"Shape", "ShapeN", "Size"}


class Lookups:
    """Which tables are read for each row of a batch, and which once for all rows."""

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}  # "rows", "batch" or "both", by variable

    def kind_of(self, variable: Any) -> str | None:
        """What is read in a table: "rows", "batch", "both"; `None` if unknown."""
        return self._kinds.get(id(variable))

    def mark(self, slices: tf.IndexedSlices, variable: Any) -> tf.IndexedSlices:
        """In a graph, mark the slices that are sums over rows.

        Args:
            slices: A rank's own gradient.
            variable: The variable of the gradient.
        """
        indices = slices.indices
        is_joined = indices.op.type == "ConcatV2"  # gradients of several lookups
        lookups = list(indices.op.inputs)[:-1] if is_joined else [indices]
        are_of_rows = [_is_of_rows(lookup) for lookup in lookups]
        if all(are_of_rows):
            # Of a graph around the one in which the slices were marked, too.
            self._kinds.setdefault(id(variable), "rows")
            return slices
        self._kinds[id(variable)] = "both" if any(are_of_rows) else "batch"
        both = [
            lookup if is_of_rows else -1 - lookup
            for lookup, is_of_rows in zip(lookups, are_of_rows, strict=True)
        ]
        return tf.IndexedSlices(slices.values, tf.concat(both, 0), slices.dense_shape)

    def unmarked(self, gradient: Any, variable: Any) -> Any:
        """The same gradient; if it is marked slices, with their own indices."""
        if not self._may_be_marked(gradient, variable):
            return gradient
        indices = gradient.indices
        own = tf.where(indices < 0, -1 - indices, indices)
        return tf.IndexedSlices(gradient.values, own, gradient.dense_shape)

    def before_gather(self, gradient: Any, variable: Any) -> Any:
        """A rank's own gradient; if it is slices, as `after_gather` needs them."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        slices = gradient
        if not _is_eager(slices):
            slices = self.mark(slices, variable)
        elif self.kind_of(variable) == "batch":
            slices = tf.IndexedSlices(
                slices.values, -1 - slices.indices, slices.dense_shape
            )
        if not self._may_be_marked(slices, variable):
            return slices
        indices = _numbered(slices.indices, variable.shape[0])
        return tf.IndexedSlices(slices.values, indices, slices.dense_shape)

    def after_gather(
        self, gradient: Any, count: Any, variable: Any, *, rows: Any, name: str
    ) -> Any:
        """The slices of all ranks; those that are sums over rows are added up.

        Args:
            gradient: The slices of all ranks; tensors are returned as they are.
            count: How many of them are of this rank.
            variable: The variable of the gradient.
            rows: The rows of this rank's batch, if known.
            name: A fixed name, the same on all ranks.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        indices, kind = gradient.indices, self.kind_of(variable)
        if kind == "rows":
            return gradient
        if _is_eager(gradient) and kind != "batch":
            own = tf.stack([count, tf.cast(0 if rows is None else rows, count.dtype)])
            sizes = comm.gather_rows(own[tf.newaxis], name=f"{name}.sizes").numpy()
            per_rank = tf.split(indices, sizes[:, 0])
            if not _look_alike([part.numpy() for part in per_rank], sizes[:, 1]):
                self._kinds[id(variable)] = "rows"
                return gradient
            numbered = [_numbered(-1 - part, variable.shape[0]) for part in per_rank]
            indices = tf.concat(numbered, 0)
        values, indices = _added_up(gradient.values, indices, variable.shape[0])
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def _may_be_marked(self, gradient: Any, variable: Any) -> bool:
        is_rows = isinstance(gradient, tf.IndexedSlices)
        return is_rows and self._kinds.get(id(variable), "rows") != "rows"


def _numbered(indices: Any, count: int) -> Any:
    """Indices of one rank; the marked ones tell repetitions apart.

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


def _added_up(values: Any, indices: Any, count: int) -> tuple[Any, Any]:
    """Add up those slices of all ranks that are sums over rows.

    Args:
        values: The values of all ranks.
        indices: The indices of all ranks, `_numbered` by each.
        count: The number of rows of the table.

    Returns:
        Values and indices, none of them marked.
    """
    positions = tf.range(tf.size(indices, tf.int64))
    keys, segments = tf.unique(tf.where(indices < 0, indices, positions))
    number = tf.size(keys)
    added = tf.math.unsorted_segment_sum(values, segments, number)
    own = tf.math.unsorted_segment_max(indices, segments, number)
    return added, tf.where(own < 0, (-1 - own) % count, own)


def _look_alike(per_rank: Sequence[np.ndarray], rows: np.ndarray) -> bool:
    """Whether the indices of the ranks look like those of one lookup for all rows.

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


def _is_of_rows(indices: Any) -> bool:
    """Whether the number of indices grows with the rows of the batch.

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
        outer = _captured(tensor)
        if outer is None and not is_number:
            return True
        if not (outer is None or isinstance(outer, tf.__internal__.EagerTensor)):
            todo.append((outer, is_number))  # of the graph around this one
    return False


def _is_other_axis(tensor: Any) -> bool:
    """Whether a tensor is the length of an axis that is not the first one."""
    if tensor.op.type != "StridedSlice" or tensor.op.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(tensor.op.inputs[1])
    rank = tensor.op.inputs[0].op.inputs[0].shape.rank
    if begin is None or tensor.shape.rank != 0:
        return False
    axis = int(begin[0])
    return axis > 0 or (axis < 0 and rank is not None and axis + rank > 0)


def _captured(tensor: Any) -> Any:
    """What an input of a graph stands for outside of it; `None` for an argument."""
    for outer, inner in getattr(tensor.graph, "captures", []):
        if inner is tensor:
            return outer
    return None
