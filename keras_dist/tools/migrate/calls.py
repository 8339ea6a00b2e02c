"""Arguments and methods that Keras 3 no longer takes."""

from collections.abc import Sequence

import libcst as cst

from keras_dist.tools.migrate.arguments import (
    appended,
    keyword,
    literal,
    passed,
    renamed,
    with_value,
    without,
)
from keras_dist.tools.migrate.names import dotted
from keras_dist.tools.migrate.script import Script

_METHODS = {
    "fit_generator": (
        *("x", "steps_per_epoch", "epochs", "verbose", "callbacks"),
        *("validation_data", "validation_steps"),
    ),
    "evaluate_generator": ("x", "steps"),
    "predict_generator": ("x", "steps"),
}
# Of the loaders of data, with their defaults, under which they do nothing.
_LOADERS = {"workers": 1, "use_multiprocessing": False, "max_queue_size": 10}
_READING = ("fit", "evaluate", "predict", *_METHODS)
_FLAG = "experimental_run_tf_function"
# Positions of the arguments of Keras 2.
_COMPILE = (
    *("optimizer", "loss", "metrics", "loss_weights", "weighted_metrics"),
    *("run_eagerly", "steps_per_execution", "jit_compile"),
)
_WEIGHT = ("name", "shape", "dtype", "initializer", "regularizer", "trainable")
_METRICS = ("keras.metrics.", "keras.losses.")
_FORMATTED = cst.FormattedString
_EQUAL = cst.AssignEqual(
    whitespace_before=cst.SimpleWhitespace(""),
    whitespace_after=cst.SimpleWhitespace(""),
)


def change_compile(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`compile(experimental_run_tf_function=False)`."""
    if _method(original) != "compile":
        return updated
    updated = renamed(
        updated, "experimental_steps_per_execution", "steps_per_execution"
    )
    mode = keyword(updated, "sample_weight_mode")
    if mode is not None and literal(mode.value) is None:
        updated = without(updated, ["sample_weight_mode"])
    updated = without(updated, [_FLAG])
    if script.names.of(original.func) is not None or len(original.args) < 3:
        return updated
    third = original.args[2]
    if third.keyword is not None or any(arg.star for arg in original.args):
        return updated
    if _is_of_numbers(third.value, script):
        return updated  # as in Keras 3
    if not _are_metrics(third.value, script):
        if not script.is_model(original.func.value):  # type: ignore[attr-defined]
            return updated
        reason = "the third argument of compile was metrics, and is loss_weights now"
        script.left(original, reason, "Pass metrics= by its name")
        return updated
    return _named(updated, _COMPILE)


def _is_of_numbers(node: cst.BaseExpression, script: Script) -> bool:
    """Whether these are `loss_weights`."""
    inner = _elements(node, script)
    return bool(inner) and all(isinstance(literal(one), (int, float)) for one in inner)


def _are_metrics(node: cst.BaseExpression, script: Script) -> bool:
    """Whether these are metrics: texts, or what `keras.metrics` and the file have."""
    inner = _elements(node, script)
    return bool(inner) and all(
        isinstance(one, cst.SimpleString)
        or (dotted(one) or "") in script.functions
        or (script.names.of(getattr(one, "func", one)) or "").startswith(_METRICS)
        for one in inner
    )


def _elements(
    node: cst.BaseExpression, script: Script, depth: int = 0
) -> list[cst.BaseExpression]:
    """What is in a list or a dict, or in that which a name is."""
    name = dotted(node)
    if name is not None and len(values := script.values_at(name, node)) == 1:
        node = values[0] or node
    if not isinstance(node, (cst.List, cst.Tuple, cst.Dict)) or depth > 4:
        return []
    inner = [getattr(one, "value", node) for one in node.elements]
    return [x for one in inner for x in (_elements(one, script, depth + 1) or [one])]


def _named(call: cst.Call, names: Sequence[str], first: int = 2) -> cst.Call:
    """The call with its arguments passed by name, from the third one on."""
    args = list(call.args)
    for index, arg in enumerate(args[: len(names)]):
        if arg.keyword is None and index >= first:
            args[index] = arg.with_changes(keyword=cst.Name(names[index]), equal=_EQUAL)
    return call.with_changes(args=args)


def change_weight(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`self.add_weight("kernel", (3, 4))`, where Keras 3 wants the shape first."""
    first = original.args[0] if original.args else None
    is_name = first is not None and first.keyword is None and not first.star
    if _method(original) != "add_weight" or not is_name:
        return updated
    if first is None or not isinstance(first.value, (cst.SimpleString, _FORMATTED)):
        return updated
    return _named(updated, _WEIGHT, first=0)


def change_flag(
    original: cst.SimpleString, updated: cst.SimpleString, script: Script
) -> cst.BaseExpression:
    """`{"experimental_run_tf_function": False}`."""
    if original.evaluated_value == _FLAG:
        script.left(original, f"compile of Keras 3 has no {_FLAG}", "Remove the entry")
    if original.evaluated_value == "TF_USE_LEGACY_KERAS":
        script.left(original, "this chooses Keras 2", "Remove the line")
    return updated


def change_generator(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`model.fit_generator(data, 100, 10)`: only the data is passed by position."""
    method = _method(original)
    if method not in _METHODS or not isinstance(updated.func, cst.Attribute):
        return updated
    names = _METHODS[method]
    unnamed = [arg for arg in updated.args if arg.keyword is None]
    if len(unnamed) > len(names) or any(arg.star for arg in updated.args):
        script.left(
            original,
            f"Keras 3 has no {method}, and its arguments here have no names",
            f"Use {method.removesuffix('_generator')}, with arguments by their names",
        )
        return updated
    func = updated.func.with_changes(attr=cst.Name(method.removesuffix("_generator")))
    updated = _named(updated.with_changes(func=func), names, first=1)
    updated = renamed(updated, "generator", "x")
    if method != "fit_generator" and keyword(updated, "verbose") is None:
        updated = appended(updated, "verbose", cst.Integer("0"))  # their default
    return updated


def change_loaders(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`model.fit(sequence, workers=4)`."""
    if _method(original) not in _READING:
        return updated
    found = {name: keyword(updated, name) for name in _LOADERS}
    for name, arg in found.items():
        if arg is not None and literal(arg.value) != _LOADERS[name]:
            script.note(
                arg if arg in original.args else original,
                f"fit of Keras 3 has no {name}=, which was removed",
                f"Pass it to the keras.utils.PyDataset: super().__init__({name}=…)",
            )
    return without(updated, _LOADERS)


def change_embedding(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`Embedding(1000, 16, input_length=20)`."""
    name = script.names.of(original.func) or ""
    if name.startswith("keras.layers.") and name.endswith(".Embedding"):
        return without(updated, ["input_length"])
    return updated


def change_checkpoint(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`ModelCheckpoint(path, period=5)`."""
    if script.names.of(original.func) != "keras.callbacks.ModelCheckpoint":
        return updated
    period = keyword(updated, "period")
    if period is None:
        return updated
    if literal(period.value) == 1:
        return without(updated, ["period"])
    steps = _steps(original, script)
    if steps is not None:
        value = cst.BinaryOperation(
            _factor(period.value), cst.Multiply(), _factor(steps)
        )
        return with_value(renamed(updated, "period", "save_freq"), "save_freq", value)
    script.left(
        original,
        "ModelCheckpoint of Keras 3 counts batches, not epochs, so it has no period=",
        "Use save_freq=period * steps_per_epoch, without names of val_ in the path",
    )
    return updated


def _factor(node: cst.BaseExpression) -> cst.BaseExpression:
    """An expression as a factor, in parentheses where it needs them."""
    if isinstance(node, cst.BinaryOperation) and not node.lpar:
        return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return node


def _steps(checkpoint: cst.Call, script: Script) -> cst.BaseExpression | None:
    """The steps of an epoch, where a checkpoint can count by them to the same moments.

    With values of the validation in its name, or by which it is chosen, it cannot: they
    are not there yet at the last batch of an epoch.
    """
    best = passed(checkpoint, "save_best_only", 3)
    is_best = best is not None and literal(best) is not False
    path = passed(checkpoint, "filepath", 0)
    if is_best or path is None:
        return None
    if "val_" in script.module.code_for_node(path) or dotted(path) is not None:
        return None
    fits = [
        node
        for node in script.nodes
        if isinstance(node, cst.Call) and _method(node) in ("fit", "fit_generator")
    ]
    steps = keyword(fits[0], "steps_per_epoch") if len(fits) == 1 else None
    if steps is None or not script.is_known_before(steps.value, checkpoint):
        return None
    return steps.value


def _method(call: cst.Call) -> str | None:
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else None
