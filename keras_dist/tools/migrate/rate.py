"""The learning rate of an optimizer, read and set."""

import libcst as cst

from keras_dist.tools.migrate import keras_3, moved
from keras_dist.tools.migrate.names import dotted
from keras_dist.tools.migrate.script import Script

_READS = ("keras.backend.get_value", "keras.backend.eval")
_SETS = "keras.backend.set_value"


def change_attribute(
    original: cst.Attribute, updated: cst.Attribute, script: Script
) -> cst.BaseExpression:
    """`model.optimizer.lr`."""
    if original.attr.value == "lr" and script.is_optimizer(original.value):
        return updated.with_changes(attr=cst.Name("learning_rate"))
    return updated


def change_text(
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


def change_call(
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
    """`float(K.get_value(optimizer.lr))` needs one `float` afterwards, too."""
    if isinstance(inner, cst.Call) and script.names.of(inner.func) in _READS:
        changed = updated.args[0].value
        if isinstance(changed, cst.Call) and dotted(changed.func) == "float":
            return changed
    return updated


def change_statement(
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
    """Whether an argument of `K.get_value` is a rate, of whatever optimizer."""
    if not isinstance(node, cst.Attribute) or dotted(node.value) == "self":
        return False
    return node.attr.value in ("lr", "learning_rate")


def _rate(node: cst.BaseExpression) -> cst.BaseExpression:
    """The rate by its name of Keras 3."""
    return cst.ensure_type(node, cst.Attribute).with_changes(
        attr=cst.Name("learning_rate")
    )


def _leave(node: cst.Call, name: str, script: Script) -> None:
    full, is_tf = moved.keras_name(script.names.raw(node.func) or name)
    if name == "keras.backend.eval" and keras_3.missing(full, is_tf=is_tf) is None:
        return
    short = name.rpartition(".")[2]
    instead = "variable.assign(value)" if name == _SETS else "variable.numpy()"
    script.left(node, f"keras.backend of Keras 3 has no {short}", f"Use {instead}")
