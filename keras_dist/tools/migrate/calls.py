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
    Node,
    Script,
    canonical,
    dotted,
    method_of,
    owner_of,
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


def change_compile(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`compile(experimental_run_tf_function=False)`."""
    if method_of(old) != "compile":
        return new
    new = renamed(new, "experimental_steps_per_execution", "steps_per_execution")
    mode = keyword(new, "sample_weight_mode")
    is_none = mode is not None and literal(mode.value) is None
    new = without(new, [_FLAG, *["sample_weight_mode"] * is_none])
    if script.names.of(old.func) is not None or len(old.args) < 3:
        return new
    third = old.args[2]
    if third.keyword is not None or any(arg.star for arg in old.args):
        return new
    if _is_of_numbers(third.value, script):
        return new  # as in Keras 3
    if not _are_metrics(third.value, script):
        if not script.is_model(owner_of(old)):
            return new
        reason = "the third argument of compile was metrics, and is loss_weights now"
        script.leave(old, reason, "Pass metrics= by its name")
        return new
    return _named(new, _COMPILE)


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


def change_weight(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`self.add_weight("kernel", (3, 4))`, where Keras 3 wants the shape first."""
    first = old.args[0] if old.args else None
    if method_of(old) != "add_weight" or first is None or first.keyword:
        return new
    if first.star or not isinstance(
        first.value, (cst.SimpleString, cst.FormattedString)
    ):
        return new
    return _named(new, _WEIGHT, first=0)


def list_flag(node: cst.SimpleString, script: Script) -> None:
    """`{"experimental_run_tf_function": False}`."""
    if node.evaluated_value == _FLAG:
        script.leave(node, f"compile of Keras 3 has no {_FLAG}", "Remove the entry")
    if node.evaluated_value == "TF_USE_LEGACY_KERAS":
        script.leave(node, "this chooses Keras 2", "Remove the line")


def change_generator(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`model.fit_generator(data, 100, 10)`: only the data is passed by position."""
    method = method_of(old)
    if method not in _METHODS or not isinstance(new.func, cst.Attribute):
        return new
    names = _METHODS[method]
    unnamed = [arg for arg in new.args if arg.keyword is None]
    if len(unnamed) > len(names) or any(arg.star for arg in new.args):
        script.leave(
            old,
            f"Keras 3 has no {method}, and its arguments here have no names",
            f"Use {method.removesuffix('_generator')}, with arguments by their names",
        )
        return new
    func = new.func.with_changes(attr=cst.Name(method.removesuffix("_generator")))
    new = _named(new.with_changes(func=func), names, first=1)
    new = renamed(new, "generator", "x")
    if method != "fit_generator" and keyword(new, "verbose") is None:
        new = appended(new, "verbose", cst.Integer("0"))  # their default
    return new


def change_loaders(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`model.fit(sequence, workers=4)`."""
    if method_of(old) not in _READING:
        return new
    found = {name: keyword(new, name) for name in _LOADERS}
    for name, arg in found.items():
        if arg is not None and literal(arg.value) != _LOADERS[name]:
            script.note(
                arg if arg in old.args else old,
                f"fit of Keras 3 has no {name}=, which was removed",
                f"Pass it to the keras.utils.PyDataset: super().__init__({name}=…)",
            )
    return without(new, _LOADERS)


def change_embedding(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`Embedding(1000, 16, input_length=20)`."""
    name = script.names.of(old.func) or ""
    if name.startswith("keras.layers.") and name.endswith(".Embedding"):
        return without(new, ["input_length"])
    return new


def change_checkpoint(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`ModelCheckpoint(path, period=5)`."""
    if script.names.of(old.func) != "keras.callbacks.ModelCheckpoint":
        return new
    period = keyword(new, "period")
    if period is None:
        return new
    if literal(period.value) == 1:
        return without(new, ["period"])
    steps = _steps(old, script)
    if steps is not None:
        value = cst.BinaryOperation(
            _factor(period.value), cst.Multiply(), _factor(steps)
        )
        return with_value(renamed(new, "period", "save_freq"), "save_freq", value)
    script.leave(
        old,
        "ModelCheckpoint of Keras 3 counts batches, not epochs, so it has no period=",
        "Use save_freq=period * steps_per_epoch, without names of val_ in the path",
    )
    return new


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


def change_optimizer(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`SGD(lr=0.1, decay=1e-6)`."""
    is_known = script.optimizer_class(old) is not None
    if not is_known and not script.is_optimizer_class(old.func):
        _list_rate(old, script)
        return new
    if keyword(new, "learning_rate") is None:
        new = renamed(new, "lr", "learning_rate")
    epsilon = keyword(new, "epsilon")
    if epsilon is not None and literal(epsilon.value) is None:
        new = without(new, ["epsilon"])  # Keras 2's word for the default
    decay = keyword(new, "decay")
    if decay is None:
        return new
    if literal(decay.value) in (None, 0, 0.0):
        return without(new, ["decay"])
    rate = passed(new, "learning_rate", 0)
    reason = _why_no_schedule(rate, old, script)
    if reason is not None or rate is None:
        script.leave(
            old,
            f"Keras 3 ignores decay= of an optimizer, and {reason}",
            "Pass learning_rate=keras.optimizers.schedules.InverseTimeDecay("
            "initial_learning_rate=…, decay_steps=1, decay_rate=…)",
        )
        return new
    return _scheduled(without(new, ["decay"]), rate, decay.value, script)


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
        script.leave(call, reason, "Pass learning_rate=")


def change_variables(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`optimizer.variables()`, which is a property of Keras 3."""
    if old.args or method_of(old) != "variables":
        return new
    if script.is_optimizer(owner_of(old)):
        return new.func
    is_known = script.names.of(old.func) or "variables" in script.functions
    if not is_known and isinstance(new.func, cst.Attribute):
        reason = "variables of Keras 3's optimizers is no method"
        script.leave(old, reason, "Leave out the parentheses, if it is Keras's")
    return new


def change_legacy_name(old: cst.Attribute, new: cst.Attribute, script: Script) -> Node:
    """`keras.optimizers.legacy.SGD`."""
    module, _, name = (script.names.of(old) or "").rpartition(".")
    if module != _LEGACY or name not in OPTIMIZERS:
        return new
    inner = new.value
    if isinstance(inner, cst.Attribute) and inner.attr.value == "legacy":
        return new.with_changes(value=inner.value)
    script.leave(
        old,
        "Keras 3 has no optimizers.legacy",
        f"Use keras.optimizers.{name}",
    )
    return new


def change_legacy_import(
    old: cst.ImportFrom, new: cst.ImportFrom, script: Script
) -> cst.ImportFrom:
    """`from keras.optimizers.legacy import SGD`."""
    module = new.module
    if canonical(dotted(module) or "") != _LEGACY or new.relative:
        return new
    if isinstance(new.names, cst.ImportStar) or not all(
        dotted(one.name) in OPTIMIZERS for one in new.names
    ):
        advice = "Import the optimizers from keras.optimizers"
        script.leave(old, "Keras 3 has no optimizers.legacy", advice)
        return new
    return new.with_changes(module=cst.ensure_type(module, cst.Attribute).value)


def change_rate(old: cst.Attribute, new: cst.Attribute, script: Script) -> Node:
    """`model.optimizer.lr`."""
    if old.attr.value == "lr" and script.is_optimizer(old.value):
        return new.with_changes(attr=cst.Name("learning_rate"))
    return new


def change_rate_text(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`hasattr(model.optimizer, "lr")`."""
    if dotted(old.func) not in ("hasattr", "getattr", "setattr"):
        return new
    if len(old.args) < 2 or not script.is_optimizer(old.args[0].value):
        return new
    name = new.args[1].value
    if isinstance(name, cst.SimpleString) and name.evaluated_value == "lr":
        name = name.with_changes(value=name.value.replace("lr", "learning_rate"))
        second = new.args[1].with_changes(value=name)
        args = [new.args[0], second, *new.args[2:]]
        return new.with_changes(args=args)
    return new


def change_rate_call(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`K.get_value(optimizer.lr)` and, in an expression, `K.set_value(…)`."""
    name = script.names.of(old.func)
    if dotted(old.func) == "float" and len(old.args) == 1:
        return _once(old.args[0].value, new, script)
    if name not in (*_READS, _SETS) or not old.args:
        return new
    if not _is_rate(old.args[0].value):
        _leave(old, str(name), script)
        return new
    if name in _READS:
        rate = cst.Arg(value=_rate(new.args[0].value))
        return new.with_changes(func=cst.Name("float"), args=[rate])
    if len(old.args) != 2:
        return new
    target, value = new.args
    func = cst.Attribute(value=_rate(target.value), attr=cst.Name("assign"))
    return new.with_changes(func=func, args=[value.with_changes(keyword=None)])


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
    old: cst.Expr, new: cst.Expr, script: Script
) -> cst.BaseSmallStatement:
    """`K.set_value(optimizer.lr, value)` on a line of its own."""
    call, changed = old.value, new.value
    if not isinstance(call, cst.Call) or not isinstance(changed, cst.Call):
        return new
    if script.names.of(call.func) != _SETS or len(call.args) != 2:
        return new
    if not _is_rate(call.args[0].value) or not isinstance(changed.func, cst.Attribute):
        return new
    target = cst.ensure_type(changed.func.value, cst.Attribute)
    value = changed.args[0].value
    if "\n" in cst.Module([]).code_for_node(value) and not value.lpar:
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.Assign(
        targets=[cst.AssignTarget(target=target)],
        value=value,
        semicolon=new.semicolon,
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
    script.leave(node, f"keras.backend of Keras 3 has no {short}", f"Use {instead}")
