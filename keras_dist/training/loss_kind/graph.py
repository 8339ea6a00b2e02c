"""Read in a graph which tensors have rows, and which are computed from others."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.optimizer import step_context

# Operations of two tensors whose axes have the same lengths, or one of them is 1.
_BROADCASTING = {"Add", "AddV2", "Sub", "Mul", "RealDiv", "SquaredDifference"}
_BROADCASTING |= {"Maximum", "Minimum", "SelectV2", "DivNoNan"}

# Where a graph begins: values that are known when it runs.
_INPUTS = {"Placeholder", "PlaceholderWithDefault", "IteratorGetNext", "_Arg"}


def num_rows(data: Any) -> Any:
    """Rows in a batch: the length of the first axis of its targets, or of its inputs.

    Inputs may be longer, as the atoms of a batch of molecules that is one graph.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    for leaf in (*keras.tree.flatten(y), *keras.tree.flatten(x)):
        if leaf is not None and len(leaf.shape):
            return tf.shape(leaf)[0] if leaf.shape[0] is None else leaf.shape[0]
    return 1


def rows_fixed_in(graph: Any) -> int | None:
    """The number of rows that a graph is bound to where the batch's shape is open.

    A step may add an array of a constant number of rows to its batch, such as noise;
    the sum has as many.

    Args:
        graph: A graph in which a train step is traced.
    """
    for op in graph.get_operations():
        if op.type in _BROADCASTING and op.outputs[0].shape.rank:
            rows, rank = op.outputs[0].shape[0], op.outputs[0].shape.rank
            shapes = [t.shape for t in op.inputs if t.shape.rank == rank]
            if rows is not None and any(shape[0] is None for shape in shapes):
                return rows
    return None


class RowGraph:
    """Reads one graph.

    Args:
        rows: The number of rows of the batch, if the graph is traced with it; `None` if
            shapes leave it open.
    """

    def __init__(self, rows: int | None = None) -> None:
        self.rows = rows if rows is not None and rows > 1 else None
        self._memory: dict[Any, bool] = {}

    def has_rows(self, tensor: Any) -> bool:
        """Whether an axis of a tensor is as long as the batch, or open."""
        shape = tensor.shape
        if shape.rank is None or None in tuple(shape):
            return tensor.dtype not in (tf.resource, tf.variant)
        is_long = bool(shape.rank) and shape[0] == self.rows
        return is_long and self._reaches(tensor, self._is_batch, "batch")

    def depends_on_rows(self, tensor: Any) -> bool:
        """Whether a tensor is computed from one that has rows."""
        if step_context.known_as(tensor) == "constant":
            return False
        return self._reaches(tensor, self._begins_rows, "rows")

    def is_read(self, tensor: Any) -> bool:
        """Whether a tensor is computed from values that are known when it runs."""
        return self._reaches(tensor, is_input, "reads")

    def depends_on(self, tensor: Any, sources: Sequence[Any]) -> bool:
        """Whether a tensor has a gradient with respect to one of some variables."""
        plain = [s.value if isinstance(s, keras.Variable) else s for s in sources]
        handles = {id(source.handle) for source in plain}
        captured = {
            id(inner)
            for outer, inner in getattr(tensor.graph, "captures", [])
            if id(outer) in handles
        }
        found = handles | captured
        purpose = f"sources {sorted(handles)}"
        return self._reaches(
            tensor, lambda t: id(t) in found, purpose, is_passed=_has_gradient
        )

    def _begins_rows(self, tensor: Any) -> bool:
        if step_context.known_as(tensor) == "mean":
            return True
        return self.has_rows(tensor) if self.rows is None else self._is_batch(tensor)

    def _is_batch(self, tensor: Any) -> bool:
        shape = tensor.shape
        if tensor.dtype in (tf.resource, tf.variant) or shape.rank == 0:
            return False
        if shape.rank is None or None in tuple(shape):
            return True
        return tensor.op.type in _INPUTS and shape[0] == self.rows

    def _reaches(
        self,
        tensor: Any,
        is_end: Callable[[Any], bool],
        purpose: str,
        is_passed: Callable[[Any], bool] = lambda tensor: True,
    ) -> bool:
        """Whether a tensor or one before it is an end; without Python's recursion.

        Args:
            tensor: Where to begin.
            is_end: Tells an end.
            purpose: What is looked for: answers are remembered.
            is_passed: Whether to look at what a tensor is computed from.
        """
        seen, todo = set(), [tensor]
        while todo:
            current = todo.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            key = (purpose, id(current))
            known = self._memory.get(key)
            if known or (known is None and is_end(current)):
                self._memory[(purpose, id(tensor))] = True
                return True
            is_open = known is None and step_context.known_as(current) is None
            if is_open and is_passed(current):
                todo += current.op.inputs
        for found in seen:
            self._memory[(purpose, found)] = False
        return False


def _has_gradient(tensor: Any) -> bool:
    is_number = tensor.dtype.is_floating or tensor.dtype.is_complex
    return is_number and tensor.op.type != "StopGradient"


def is_input(tensor: Any) -> bool:
    """Whether a value is known only when the graph runs."""
    return tensor.op.type in _INPUTS or tensor.op.op_def.is_stateful
