"""Arguments and methods that Keras 3 no longer takes, of models and of optimizers.

Each rule takes a node of the file, the node with what has changed in it, and the file.
"""

import re
from collections.abc import Sequence

import libcst as cst

from keras_dist.tools.migrate import gone
from keras_dist.tools.migrate.arguments import (
    EQUAL,
    appended,
    keyword,
    literal,
    passed,
    renamed,
    with_value,
    without,
)
from keras_dist.tools.migrate.script import (
    OPTIMIZERS,
    Script,
    canonical,
    dotted,
    method_of,
)

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

_LEGACY = "keras.optimizers.legacy"

# Functions that read the rate of an optimizer, and the one that sets it.
_READS = ("keras.backend.get_value", "keras.backend.eval")
_SETS = "keras.backend.set_value"


def change_compile(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`compile(experimental_run_tf_function=False)`."""
    if method_of(original) != "compile":
        return updated
    updated = renamed(
        updated, "experimental_steps_per_execution", "steps_per_execution"
    )
    mode = keyword(updated, "sample_weight_mode")
    is_none = mode is not None and literal(mode.value) is None
    updated = without(updated, [_FLAG, *["sample_weight_mode"] * is_none])
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
    """Tell whether these are `loss_weights`."""
    inner = _elements(node, script)
    return bool(inner) and all(isinstance(literal(one), (int, float)) for one in inner)


def _are_metrics(node: cst.BaseExpression, script: Script) -> bool:
    """Tell whether these are metrics: texts, or of `keras.metrics` and the file."""
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
    """Return what is in a list or a dict, also through a name."""
    name = dotted(node)
    if name is not None and len(values := script.values_at(name, node)) == 1:
        node = values[0] or node
    if not isinstance(node, (cst.List, cst.Tuple, cst.Dict)) or depth > 4:
        return []
    inner = [getattr(one, "value", node) for one in node.elements]
    return [x for one in inner for x in (_elements(one, script, depth + 1) or [one])]


def _named(call: cst.Call, names: Sequence[str], first: int = 2) -> cst.Call:
    """Return the call with its arguments passed by name, by default from the third."""
    args = list(call.args)
    for index, arg in enumerate(args[: len(names)]):
        if arg.keyword is None and index >= first:
            args[index] = arg.with_changes(keyword=cst.Name(names[index]), equal=EQUAL)
    return call.with_changes(args=args)


def change_weight(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`self.add_weight("kernel", (3, 4))`, where Keras 3 wants the shape first."""
    first = original.args[0] if original.args else None
    if method_of(original) != "add_weight" or first is None or first.keyword:
        return updated
    if first.star or not isinstance(
        first.value, (cst.SimpleString, cst.FormattedString)
    ):
        return updated
    return _named(updated, _WEIGHT, first=0)


def list_flag(original: cst.SimpleString, script: Script) -> None:
    """`{"experimental_run_tf_function": False}`."""
    if original.evaluated_value == _FLAG:
        script.left(original, f"compile of Keras 3 has no {_FLAG}", "Remove the entry")
    if original.evaluated_value == "TF_USE_LEGACY_KERAS":
        script.left(original, "this chooses Keras 2", "Remove the line")


def change_generator(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`model.fit_generator(data, 100, 10)`: only the data is passed by position."""
    method = method_of(original)
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
    if method_of(original) not in _READING:
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
    """Return an expression as a factor, in parentheses where it needs them."""
    if isinstance(node, cst.BinaryOperation) and not node.lpar:
        return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return node


def _steps(checkpoint: cst.Call, script: Script) -> cst.BaseExpression | None:
    """Return the steps of an epoch, where a checkpoint can count them instead.

    It cannot if it is named, or chosen, by values of the validation, which come after
    the last batch of an epoch.
    """
    best = passed(checkpoint, "save_best_only", 3)
    is_best = best is not None and literal(best) is not False
    path = passed(checkpoint, "filepath", 0)
    if is_best or path is None:
        return None
    if "val_" in script.module.code_for_node(path) or dotted(path) is not None:
        return None
    fits = [one for one in script.calls if method_of(one) in ("fit", "fit_generator")]
    steps = keyword(fits[0], "steps_per_epoch") if len(fits) == 1 else None
    if steps is None or not script.is_known_before(steps.value, checkpoint):
        return None
    return steps.value


def change_optimizer(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`SGD(lr=0.1, decay=1e-6)`."""
    is_known = script.optimizer_class(original) is not None
    if not is_known and not script.is_optimizer_class(original.func):
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
    """Say why a schedule cannot replace the rate, if it cannot."""
    if rate is None:
        return "the rate is not given here"
    setters = [name for node in script.nodes if (name := _sets_rate(node, script))]
    if setters:
        return f"{setters[0]} in this file sets the rate, which no schedule allows"
    return None


def _sets_rate(node: cst.CSTNode, script: Script) -> str | None:
    """Return what reads or sets the rate of an optimizer, if this node does."""
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
    """Replace Keras 2's `decay`: rate / (1 + decay · iterations)."""
    prefix = (dotted(call.func) or "").rpartition(".")[0].removesuffix(".legacy")
    func = "InverseTimeDecay"
    if prefix:
        func = f"{prefix}.schedules.{func}"
    else:
        modules = script.names.modules
        is_tf = any(module.startswith("tensorflow.keras") for module in modules)
        module = "tensorflow." * is_tf + "keras.optimizers.schedules"
        script.new_imports.append((module, func))
    code = f"{func}(initial_learning_rate=rate, decay_steps=1, decay_rate=rate)"
    schedule = cst.ensure_type(cst.parse_expression(code), cst.Call)
    schedule = with_value(schedule, "initial_learning_rate", rate)
    schedule = with_value(schedule, "decay_rate", decay)
    if keyword(call, "learning_rate") is not None:
        return with_value(call, "learning_rate", schedule)
    return call.with_changes(
        args=[call.args[0].with_changes(value=schedule), *call.args[1:]]
    )


def _list_rate(call: cst.Call, script: Script) -> None:
    """`opt_type(lr=0.1)`, where the file does not say which class it is."""
    name = dotted(call.func) or ""
    is_known = script.names.of(call.func) is not None or name in script.functions
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace(".", "_")
    is_class = re.search(r"(^|_)opt(imizer)?_?(type|cls|class|fn)$", words)
    if is_class and not is_known and keyword(call, "lr") is not None:
        reason = f"{name} may be a class of keras.optimizers, which takes no lr="
        script.left(call, reason, "Pass learning_rate=")


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


def change_rate(
    original: cst.Attribute, updated: cst.Attribute, script: Script
) -> cst.BaseExpression:
    """`model.optimizer.lr`."""
    if original.attr.value == "lr" and script.is_optimizer(original.value):
        return updated.with_changes(attr=cst.Name("learning_rate"))
    return updated


def change_rate_text(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`hasattr(model.optimizer, "lr")`."""
    if dotted(original.func) not in ("hasattr", "getattr", "setattr"):
        return updated
    if len(original.args) < 2 or not script.is_optimizer(original.args[0].value):
        return updated
    name = updated.args[1].value
    if isinstance(name, cst.SimpleString) and name.evaluated_value == "lr":
        name = name.with_changes(value=name.value.replace("lr", "learning_rate"))
        second = updated.args[1].with_changes(value=name)
        args = [updated.args[0], second, *updated.args[2:]]
        return updated.with_changes(args=args)
    return updated


def change_rate_call(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`K.get_value(optimizer.lr)` and, in an expression, `K.set_value(…)`."""
    name = script.names.of(original.func)
    if dotted(original.func) == "float" and len(original.args) == 1:
        return _once(original.args[0].value, updated, script)
    if name not in (*_READS, _SETS) or not original.args:
        return updated
    if not _is_rate(original.args[0].value):
        _leave(original, str(name), script)
        return updated
    if name in _READS:
        rate = cst.Arg(value=_rate(updated.args[0].value))
        return updated.with_changes(func=cst.Name("float"), args=[rate])
    if len(original.args) != 2:
        return updated
    target, value = updated.args
    func = cst.Attribute(value=_rate(target.value), attr=cst.Name("assign"))
    return updated.with_changes(func=func, args=[value.with_changes(keyword=None)])


def _once(
    inner: cst.BaseExpression, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """Keep one `float` of `float(K.get_value(optimizer.lr))`."""
    if isinstance(inner, cst.Call) and script.names.of(inner.func) in _READS:
        changed = updated.args[0].value
        if isinstance(changed, cst.Call) and dotted(changed.func) == "float":
            return changed
    return updated


def change_rate_statement(
    original: cst.Expr, updated: cst.Expr, script: Script
) -> cst.BaseSmallStatement:
    """`K.set_value(optimizer.lr, value)` on a line of its own."""
    call, new = original.value, updated.value
    if not isinstance(call, cst.Call) or not isinstance(new, cst.Call):
        return updated
    if script.names.of(call.func) != _SETS or len(call.args) != 2:
        return updated
    if not _is_rate(call.args[0].value) or not isinstance(new.func, cst.Attribute):
        return updated
    target = cst.ensure_type(new.func.value, cst.Attribute)
    value = new.args[0].value
    if "\n" in cst.Module([]).code_for_node(value) and not value.lpar:
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.Assign(
        targets=[cst.AssignTarget(target=target)],
        value=value,
        semicolon=updated.semicolon,
    )


def _is_rate(node: cst.BaseExpression) -> bool:
    """Tell whether an argument of `K.get_value` is a rate, of whatever optimizer."""
    if not isinstance(node, cst.Attribute) or dotted(node.value) == "self":
        return False
    return node.attr.value in ("lr", "learning_rate")


def _rate(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the rate by its name in Keras 3."""
    return cst.ensure_type(node, cst.Attribute).with_changes(
        attr=cst.Name("learning_rate")
    )


def _leave(node: cst.Call, name: str, script: Script) -> None:
    full, is_tf = gone.keras_name(script.names.raw(node.func) or name)
    if name == "keras.backend.eval" and gone.missing(full, is_tf=is_tf) is None:
        return
    short = name.rpartition(".")[2]
    instead = "variable.assign(value)" if name == _SETS else "variable.numpy()"
    script.left(node, f"keras.backend of Keras 3 has no {short}", f"Use {instead}")
