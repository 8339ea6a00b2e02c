"""Arguments of optimizers, and the optimizers of `keras.optimizers.legacy`."""

import re

import libcst as cst

from keras_dist.tools.migrate.arguments import (
    keyword,
    literal,
    passed,
    renamed,
    with_value,
    without,
)
from keras_dist.tools.migrate.names import canonical, dotted
from keras_dist.tools.migrate.script import OPTIMIZERS, Script

_LEGACY = "keras.optimizers.legacy"


def change_optimizer(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`SGD(lr=0.1, decay=1e-6)`."""
    if script.optimizer_class(original) is None:
        is_class = script.is_optimizer_class(original.func)
        if not is_class:
            _list_rate(original, script)
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
    setters = [name for node in script.nodes if (name := _sets_rate(node, script))]
    if setters:
        return f"{setters[0]} in this file sets the rate, which no schedule allows"
    return None


def _sets_rate(node: cst.CSTNode, script: Script) -> str | None:
    """What reads or sets the rate of an optimizer, if this node does."""
    if not isinstance(node, (cst.Attribute, cst.Name)):
        return None
    if isinstance(node, cst.Attribute):
        is_rate = node.attr.value in ("lr", "learning_rate")
        if is_rate and script.is_optimizer(node.value):
            return f"optimizer.{node.attr.value}"
    name = (script.names.of(node) or "").rpartition(".")[2]
    is_setter = name.startswith("LearningRate") or name == "ReduceLROnPlateau"
    return name if is_setter else None


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


def _list_rate(call: cst.Call, script: Script) -> None:
    """`opt_type(lr=0.1)`, where the file does not say which class it is."""
    name = dotted(call.func) or ""
    is_known = script.names.of(call.func) is not None or name in script.functions
    is_class = re.search(r"(^|_)opt(imizer)?_?(type|cls|class|fn)$", _snake(name))
    if is_class and not is_known and keyword(call, "lr") is not None:
        reason = f"{name} may be a class of keras.optimizers, which takes no lr="
        script.left(call, reason, "Pass learning_rate=")


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace(".", "_")


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
    is_known = script.names.of(before) is not None or "variables" in script.functions
    if before.attr.value == "variables" and not is_known:
        reason = "variables of Keras 3's optimizers is no method"
        script.left(original, reason, "Leave out the parentheses, if it is Keras's")
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
    if canonical(dotted(module) or "") != _LEGACY or updated.relative:
        return updated
    if isinstance(updated.names, cst.ImportStar) or not all(
        dotted(one.name) in OPTIMIZERS for one in updated.names
    ):
        advice = "Import the optimizers from keras.optimizers"
        script.left(original, "Keras 3 has no optimizers.legacy", advice)
        return updated
    return updated.with_changes(module=cst.ensure_type(module, cst.Attribute).value)
