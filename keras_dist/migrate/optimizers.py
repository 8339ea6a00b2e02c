"""Arguments of optimizers, and the optimizers of `keras.optimizers.legacy`."""

import libcst as cst

from keras_dist.migrate.arguments import (
    keyword,
    literal,
    passed,
    renamed,
    with_value,
    without,
)
from keras_dist.migrate.names import canonical, dotted
from keras_dist.migrate.script import OPTIMIZERS, Script

_LEGACY = "keras.optimizers.legacy"


def change_optimizer(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`SGD(lr=0.1, decay=1e-6)`."""
    if script.optimizer_class(original) is None:
        return updated
    if keyword(updated, "learning_rate") is None:
        updated = renamed(updated, "lr", "learning_rate")
    epsilon = keyword(updated, "epsilon")
    if epsilon is not None and literal(epsilon.value) is None:
        updated = without(updated, ["epsilon"])  # Keras 2's word for the default
    decay = keyword(updated, "decay")
    if decay is None:
        return updated
    if literal(decay.value) in (None, 0, 0.0):
        return without(updated, ["decay"])
    rate = passed(updated, "learning_rate", 0)
    reason = _why_no_schedule(rate, original, script)
    if reason is not None or rate is None:
        script.left(
            original,
            f"Keras 3 ignores decay= of an optimizer, and {reason}",
            "Pass learning_rate=keras.optimizers.schedules.InverseTimeDecay("
            "initial_learning_rate=…, decay_steps=1, decay_rate=…)",
        )
        return updated
    return _scheduled(without(updated, ["decay"]), rate, decay.value, script)


def _why_no_schedule(
    rate: cst.BaseExpression | None, call: cst.Call, script: Script
) -> str | None:
    """Why a schedule cannot take the rate's position, or `None`."""
    if rate is None:
        return "the rate is not given here"
    setters = _SetsRate(script)
    script.module.visit(setters)
    if setters.found:
        return (
            f"{setters.found[0]} in this file sets the rate, which no schedule allows"
        )
    return None


class _SetsRate(cst.CSTVisitor):
    """What in a file reads or sets the rate of an optimizer."""

    def __init__(self, script: Script):
        super().__init__()
        self.found: list[str] = []
        self._script = script

    def visit_Attribute(self, node: cst.Attribute) -> None:
        """`optimizer.lr`, `keras.callbacks.ReduceLROnPlateau`."""
        self._look(node)
        is_rate = node.attr.value in ("lr", "learning_rate")
        if is_rate and self._script.is_optimizer(node.value):
            self.found.append(f"optimizer.{node.attr.value}")

    def visit_Name(self, node: cst.Name) -> None:
        """`ReduceLROnPlateau`, imported by its name."""
        self._look(node)

    def _look(self, node: cst.Attribute | cst.Name) -> None:
        name = (self._script.names.of(node) or "").rpartition(".")[2]
        if name.startswith("LearningRate") or name == "ReduceLROnPlateau":
            self.found.append(name)


def _scheduled(
    call: cst.Call,
    rate: cst.BaseExpression,
    decay: cst.BaseExpression,
    script: Script,
) -> cst.Call:
    """Keras 2's `decay`: rate / (1 + decay · iterations)."""
    prefix = (dotted(call.func) or "").removesuffix(".legacy").rpartition(".")[0]
    name = "InverseTimeDecay"
    if prefix:
        func = cst.parse_expression(
            f"{prefix.removesuffix('.legacy')}.schedules.{name}"
        )
    else:
        func = cst.Name(name)
        script.new_imports.append((_schedules_module(script), name))
    value = cst.parse_expression("f(initial_learning_rate=a, decay_steps=1, b=c)")
    assert isinstance(value, cst.Call)
    first, steps, last = value.args
    args = [
        first.with_changes(value=rate),
        steps,
        last.with_changes(keyword=cst.Name("decay_rate"), value=decay),
    ]
    schedule = value.with_changes(func=func, args=args)
    if keyword(call, "learning_rate") is not None:
        return with_value(call, "learning_rate", schedule)
    return call.with_changes(
        args=[call.args[0].with_changes(value=schedule), *call.args[1:]]
    )


def _schedules_module(script: Script) -> str:
    is_tf = any(
        module.startswith("tensorflow.keras") for module in script.names.modules
    )
    return ("tensorflow." if is_tf else "") + "keras.optimizers.schedules"


def change_variables(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`optimizer.variables()`, which is a property of Keras 3."""
    func = updated.func
    if original.args or not isinstance(func, cst.Attribute):
        return updated
    before = cst.ensure_type(original.func, cst.Attribute)
    if before.attr.value == "variables" and script.is_optimizer(before.value):
        return func
    return updated


def change_legacy_name(
    original: cst.Attribute, updated: cst.Attribute, script: Script
) -> cst.BaseExpression:
    """`keras.optimizers.legacy.SGD`."""
    module, _, name = (script.names.of(original) or "").rpartition(".")
    if module != _LEGACY or name not in OPTIMIZERS:
        return updated
    inner = updated.value
    if isinstance(inner, cst.Attribute) and inner.attr.value == "legacy":
        return updated.with_changes(value=inner.value)
    script.left(
        original,
        "Keras 3 has no optimizers.legacy",
        f"Use keras.optimizers.{name}",
    )
    return updated


def change_legacy_import(
    original: cst.ImportFrom, updated: cst.ImportFrom, script: Script
) -> cst.ImportFrom:
    """`from keras.optimizers.legacy import SGD`."""
    module = updated.module
    if canonical(dotted(module) or "") == _LEGACY and isinstance(module, cst.Attribute):
        return updated.with_changes(module=module.value)
    return updated
