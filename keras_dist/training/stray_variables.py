"""Find variables that a train step changes and the model does not keep."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist import private
from keras_dist.optimizer.step_context import known_as
from keras_dist.training.build import all_variables


@dataclass(frozen=True)
class StrayVariable:
    """A variable of which a graph knows the handle alone.

    Args:
        handle: The handle, a tensor outside of any graph.
        dtype: The dtype of its value.
    """

    handle: Any
    dtype: tf.DType

    def read(self) -> Any:
        """Return its value."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def assign(self, value: Any) -> None:
        """Set its value."""
        value = tf.cast(value, self.dtype)
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


class StrayVariables:
    """Variables outside of a model's weights, such as a `tf.Variable` of a layer.

    Nobody else knows of them: each rank would keep its own. They are found in the graph
    in which a train step is traced.
    """

    def __init__(self) -> None:
        self._found: dict[int, StrayVariable] = {}

    @property
    def floating(self) -> list[StrayVariable]:
        """Those that are averaged, in the order in which they were found."""
        return [each for each in self._found.values() if each.dtype.is_floating]

    @property
    def others(self) -> list[StrayVariable]:
        """Those that are copied from the first rank, such as counters."""
        return [each for each in self._found.values() if not each.dtype.is_floating]

    def facts(self) -> dict[str, Any]:
        """Return what has to be equal on all ranks."""
        found = [
            f"{tuple(each.read().shape)} {each.dtype.name}"
            for each in self._found.values()
        ]
        return {"the variables outside of the model that its train step changes": found}

    def find(self, model: Any) -> None:
        """Look into the graph that is being traced, if there is one.

        Args:
            model: The model whose train step was traced.
        """
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        handles = handles_of(graph)
        values = [getattr(own, "value", own) for own in all_variables(model)]
        known = {id(getattr(value, "handle", None)) for value in values}
        strangers = {
            inner: handle
            for inner, handle in handles.items()
            if id(handle) not in known and known_as(handle) != "ours"
        }
        if not strangers:
            return
        for _, handle in assignments(graph, strangers):
            dtype = tf.as_dtype(dtype_of(handle))
            self._found.setdefault(id(handle), StrayVariable(handle, dtype))


def assignments(
    graph: Any, handles: Mapping[int, Any], begin: int = 0
) -> Iterator[tuple[int, Any]]:
    """Find the operations of a graph that change some variables.

    Args:
        graph: The graph.
        handles: The handles of the variables, by the ids of the tensors that stand for
            them in the graph (`handles_of`).
        begin: The index of the first operation to look at.

    Yields:
        The index of an operation, and the handle of a variable that it changes.
    """
    for number, op in enumerate(graph.get_operations()[begin:], begin):
        for index in _assigned(op, graph):
            handle = handles.get(id(op.inputs[index]))
            if handle is not None:
                yield number, handle


def handles_of(graph: Any) -> dict[int, Any]:
    """Map each tensor that stands for a handle to the handle outside of any graph."""
    outer = getattr(graph, "outer_graph", None)
    outside = {} if outer is None else handles_of(outer)
    found = {}
    for handle, inner in getattr(graph, "captures", ()):
        if handle.dtype == tf.resource:
            origin = outside.get(id(handle), handle)
            if hasattr(origin, "numpy"):
                found[id(inner)] = origin
    return found


def dtype_of(handle: Any) -> Any:
    """Return the dtype of the value of a variable."""
    return private.type_of_handle(handle).dtype


def _assigned(op: Any, graph: Any) -> list[int]:
    """Indices of an operation's inputs that are variables which it changes."""
    if op.type.startswith("Assign") or op.type.startswith("ResourceScatter"):
        return [0]
    names = [a.func.name for a in op.node_def.attr.values() if a.HasField("func")]
    if not names or not any(t.dtype == tf.resource for t in op.inputs):
        return []
    functions = {f.signature.name: f for f in graph.as_graph_def().library.function}
    first = 1 if op.type in ("If", "StatelessIf", "Case") else 0
    return [
        index + first
        for name in names
        if name in functions
        for index in _assigned_arguments(name, functions)
        if index + first < len(op.inputs)
    ]


def _assigned_arguments(name: str, functions: Mapping[str, Any]) -> list[int]:
    """Indices of a function's arguments that are variables which it changes."""
    function = functions[name]
    arguments = [argument.name for argument in function.signature.input_arg]
    found = []
    for node in function.node_def:
        inputs = [text.partition(":")[0] for text in node.input]
        if node.op.startswith(("Assign", "ResourceScatter")):
            changed = inputs[:1]
        else:
            called = [a.func.name for a in node.attr.values() if a.HasField("func")]
            first = 1 if node.op in ("If", "StatelessIf", "Case") else 0
            changed = [
                inputs[index + first]
                for each in called
                if each in functions
                for index in _assigned_arguments(each, functions)
                if index + first < len(inputs)
            ]
        found += [arguments.index(each) for each in changed if each in arguments]
    return found
