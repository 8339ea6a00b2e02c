"""Warn of variables that a train step changes and the model does not keep."""

from typing import Any

import tensorflow as tf

from keras_dist import comm, private
from keras_dist.lines import warn
from keras_dist.optimizer.step_context import known_as
from keras_dist.training.remember import list_variables


def warn_of_stray_variables(model: Any) -> None:
    """Warn if a step changes variables outside of the model; each rank has its own.

    Call this in the graph in which the step is traced; without a graph it does nothing.
    Changes in a branch or in a loop of the graph are not seen.

    Args:
        model: The model whose train step was traced.
    """
    if tf.executing_eagerly() or comm.rank() > 0:
        return
    graph = tf.compat.v1.get_default_graph()
    handles = _handles_of(graph)
    values = [getattr(own, "value", own) for own in list_variables(model)]
    known = {id(getattr(value, "handle", None)) for value in values}
    names = {
        id(value.handle): f"{layer.name}.{name}"
        for layer in private.layers_of(model)
        for name, value in vars(layer).items()
        if isinstance(value, tf.Variable)
    }
    found = {}
    for op in graph.get_operations():
        if op.type.startswith(("Assign", "ResourceScatter")):
            handle = handles.get(id(op.inputs[0]))
            is_stray = id(handle) not in known and known_as(handle) != "ours"
            if handle is not None and is_stray:
                found[id(handle)] = names.get(id(handle), f"that of {op.name}")
    if found:
        warn(
            "A train step changes variables that the model does not keep, so that each "
            f"rank has its own value of them. Received: {', '.join(found.values())}. "
            "Make them weights of the model: `add_weight(…, trainable=False)`."
        )


def _handles_of(graph: Any) -> dict[int, Any]:
    """Map each tensor that stands for a handle to the handle outside of any graph."""
    outer = getattr(graph, "outer_graph", None)
    outside = {} if outer is None else _handles_of(outer)
    found = {}
    for handle, inner in getattr(graph, "captures", ()):
        if handle.dtype == tf.resource:
            origin = outside.get(id(handle), handle)
            if hasattr(origin, "numpy"):
                found[id(inner)] = origin
    return found
