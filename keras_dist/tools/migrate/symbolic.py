"""TensorFlow's operations on symbolic tensors, which Keras 3 does not take.

`keras.Input` makes a symbolic tensor, and so does each layer that is called with one.
"""

import libcst as cst

from keras_dist.tools.migrate.names import dotted
from keras_dist.tools.migrate.script import Script

# Of TensorFlow's operations, those that `keras.ops` has by another name.
_RENAMED = {
    "concat": "concatenate",
    "random.normal": "random.normal",
    "math.log": "log",
    "math.exp": "exp",
    "image.resize": "image.resize",
    "nn.l2_normalize": "normalize",
}
_TENSORS = ("output", "input", "outputs", "inputs")


def list_operation(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`tf.reduce_mean(x)` of the output of a layer."""
    name = script.names.of(original.func) or ""
    is_operation = name.startswith(("tf.", "tf1.", "keras.backend."))
    if not is_operation or script.is_shadowed(original.func):
        return updated
    if name in ("tf.function", "keras.backend.int_shape"):
        return updated
    if any(_is_symbolic(arg.value, script) for arg in original.args):
        text = dotted(original.func) or name
        reason = f"{text} does not take a symbolic tensor of Keras 3"
        word = name.partition(".")[2].removeprefix("backend.")
        short = _RENAMED.get(word) or word.rpartition(".")[2].removeprefix("reduce_")
        instead = short if short.startswith("random.") else f"ops.{short}"
        advice = f"Use keras.{instead}, if there is one, or a layer that calls it"
        script.left(original, reason, advice)
    return updated


def _is_symbolic(
    node: cst.CSTNode, script: Script, seen: set[cst.CSTNode] | None = None
) -> bool:
    """Whether an expression is a symbolic tensor, or a list with one.

    Args:
        node: The expression.
        script: The file.
        seen: Names that have been looked at; in a loop, values depend on each other.
    """
    known_names = set() if seen is None else seen

    def has_one(*nodes: cst.CSTNode) -> bool:
        return any(_is_symbolic(one, script, known_names) for one in nodes)

    if isinstance(node, cst.Call):
        return _gives_symbolic(node, script, has_one(*(arg.value for arg in node.args)))
    if isinstance(node, (cst.List, cst.Tuple)):
        return has_one(*(one.value for one in node.elements))
    if isinstance(node, cst.BinaryOperation):
        return has_one(node.left, node.right)
    if isinstance(node, cst.UnaryOperation):
        return has_one(node.expression)
    if isinstance(node, cst.Subscript):
        return has_one(node.value)
    if isinstance(node, cst.Attribute) and node.attr.value in _TENSORS:
        return script.is_model(node.value)
    if isinstance(node, cst.Name) and node not in known_names:
        known_names.add(node)
        values = [v for v in script.values_at(node.value, node) if v is not node]
        known = [value for value in values if value is not None]
        return len(known) == len(values) > 0 and has_one(*known)
    return False


def _gives_symbolic(node: cst.Call, script: Script, is_called_with_one: bool) -> bool:
    """Whether a call is `keras.Input(…)`, or of a layer or function with a tensor."""
    name = script.names.of(node.func)
    if name in ("keras.Input", "keras.layers.Input"):
        return True
    # A method such as `x.shape.as_list()`, a class and TensorFlow's functions are not.
    is_ours = name is None and not isinstance(node.func, cst.Attribute)
    is_operation = (name or "").startswith("keras.ops.")
    return is_called_with_one and (is_ours or is_operation)
