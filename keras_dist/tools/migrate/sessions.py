"""Sessions of TensorFlow 1, and what else TensorFlow 2 no longer has."""

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst

from keras_dist.tools.migrate.script import (
    Node,
    Script,
    assigns,
    count_uses,
    dotted,
    dotted_node,
    walk,
)

_NO_SESSIONS = "Call the model, its fit or its train_on_batch; there is no session"
_TRAIN = "Use a class of keras.optimizers"
_GONE = {
    "Session": _NO_SESSIONS,
    "InteractiveSession": _NO_SESSIONS,
    "train.MonitoredTrainingSession": "Use Model.fit and its callbacks",
    "ConfigProto": "Use tf.config.set_visible_devices and tf.config.experimental."
    "set_memory_growth",
    "GPUOptions": "Use tf.config.experimental.set_memory_growth",
    "placeholder": "Use keras.Input",
    "global_variables_initializer": "Remove it: variables have values when made",
    "local_variables_initializer": "Remove it: variables have values when made",
    "get_default_graph": "Remove it: Keras 3 runs eagerly",
    "reset_default_graph": "Use keras.utils.clear_session()",
    "disable_eager_execution": "Remove it: Keras 3 runs eagerly",
    "disable_v2_behavior": "Remove it: Keras 3 needs TensorFlow 2",
    "train.AdamOptimizer": _TRAIN,
    "train.GradientDescentOptimizer": _TRAIN,
    "train.MomentumOptimizer": _TRAIN,
    "train.RMSPropOptimizer": _TRAIN,
    "train.AdagradOptimizer": _TRAIN,
}
# What TensorFlow 2 has under `compat.v1` alone, and means the same there.
_MOVED = ("logging", "app", "flags", "gfile")
_SESSIONS = ("tf.Session", "tf1.Session")
_EAGER = ("tf.enable_eager_execution", "tf1.enable_eager_execution")
_SET_SESSION = "keras.backend.set_session"
_PROTOS = ("tf.ConfigProto", "tf1.ConfigProto")


def change_name(old: cst.Attribute, new: cst.Attribute, script: Script) -> Node:
    """`tf.logging`, `tf.Session`."""
    name = script.names.of(old) or ""
    if name.startswith("tf.") and name[3:] in _MOVED:
        return new.with_changes(value=dotted_node("compat.v1", new.value))
    if name == "tf.set_random_seed":
        return dotted_node("random.set_seed", new.value)
    if old not in script.handled:
        _list_gone(old, name, script)
    return new


def _list_gone(node: cst.Attribute, name: str, script: Script) -> None:
    root, _, rest = name.partition(".")
    if name == _EAGER[0]:
        advice = "Remove it: TensorFlow 2 runs eagerly"
    elif root in ("tf", "tf1") and rest in _GONE:
        name, advice = f"tf.{rest}", _GONE[rest]
    elif name in (_SET_SESSION, "keras.backend.get_session"):
        advice = _NO_SESSIONS
    else:
        return
    line = script.line(node)
    lines = {one.line for one in script.findings if "TensorFlow 1" in one.reason}
    if line not in lines:  # of several names on one line, the innermost
        script.leave(node, f"{name} is of TensorFlow 1", advice)


class SessionLines:
    """Find the lines that give this rank's GPU to a session of Keras.

    Args:
        script: The file.
    """

    def __init__(self, script: Script):
        self._script = script
        self._new: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
        self._tf = script.names.local_name("tf") or script.names.local_name("tf1")
        functions = [one for one in script.nodes if isinstance(one, cst.FunctionDef)]
        for scope in (script.module, *functions):
            for node in walk(scope, stop=cst.FunctionDef):
                if isinstance(node, (cst.Module, cst.IndentedBlock)):
                    self._look(node.body, scope)

    def change(self, original: Any, updated: Any) -> Any:
        """Return a block with new lines for the ones that were found in it."""
        if not any(line in self._new for line in original.body):
            return updated
        body: list[Any] = []
        comments: list[cst.EmptyLine] = []
        for old, line in zip(original.body, updated.body, strict=True):
            lines = list(self._new.get(old, [line]))
            leading = list(line.leading_lines)
            if old in self._new and not lines:
                leading += _trailing(line)
                comments += [one for one in leading if one.comment is not None]
                continue
            if old in self._new:
                leading += _trailing(line)
            first: Any = lines[0]
            first = first.with_changes(leading_lines=[*comments, *leading])
            comments = []
            body += [first, *lines[1:]]
        if not body:
            body = [cst.SimpleStatementLine([cst.Pass()], leading_lines=comments)]
            comments = []
        footer = [*comments, *updated.footer] if comments else updated.footer
        return updated.with_changes(body=body, footer=footer)

    def _look(self, body: Sequence[Any], scope: cst.CSTNode) -> None:
        small = [(line, _only(line)) for line in body]
        self._remove_eager(small)
        for line, node in small:
            config = self._made(node, _PROTOS)
            if config is not None and self._tf is not None:
                self._replace(config, line, small, scope)

    def _remove_eager(self, small: list[tuple[Any, Any]]) -> None:
        for line, node in small:
            call = node.value if isinstance(node, cst.Expr) else None
            if not isinstance(call, cst.Call) or call.args:
                continue
            if self._script.names.of(call.func) == _EAGER[0]:
                self._new[line] = []  # TensorFlow 2 always runs eagerly
                self._script.handled |= set(walk(line))

    def _made(self, node: Any, makers: tuple[str, ...]) -> str | None:
        """Return the name to which a line assigns the result of one of these."""
        if not isinstance(node, cst.Assign) or not isinstance(node.value, cst.Call):
            return None
        is_made = self._script.names.of(node.value.func) in makers
        return dotted(node.targets[0].target) if is_made else None

    def _replace(
        self,
        config: str,
        first: Any,
        small: list[tuple[Any, Any]],
        scope: cst.CSTNode,
    ) -> None:
        """Find new lines for all lines about a config, if all are understood."""
        names = {config}
        new: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
        for line, node in small:
            session = self._made(node, _SESSIONS)
            if line is first:
                lines = self._of_maker(node)
            elif session is not None and _mentions(node, names):
                names.add(session)
                lines = []
            elif _mentions(node if node is not None else line, names):
                lines = self._of_line(config, node)
            else:
                continue
            if lines is None:
                return
            new[line] = lines
        inside = sum(count_uses(line, names) for line in new)
        if inside != count_uses(scope, names) or len(new) < 2:
            return
        self._new |= new
        for line in new:
            self._script.handled |= set(walk(line))

    def _of_maker(self, node: cst.Assign) -> list[cst.BaseStatement] | None:
        call = cst.ensure_type(node.value, cst.Call)
        allowed = ("allow_soft_placement", "log_device_placement")
        if any(
            arg.keyword is None or arg.keyword.value not in allowed for arg in call.args
        ):
            return None
        return [_line(f'gpus = {self._tf}.config.list_physical_devices("GPU")')]

    def _of_line(self, config: str, node: Any) -> list[cst.BaseStatement] | None:
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
            name = self._script.names.of(node.value.func)
            return [] if name in (_SET_SESSION, *_EAGER) else None
        if not isinstance(node, cst.Assign) or len(node.targets) != 1:
            return None
        target = dotted(node.targets[0].target) or ""
        value = self._script.module.code_for_node(node.value)
        option = target.removeprefix(f"{config}.")
        if option == "gpu_options.allow_growth" and value == "True":
            text = f"for gpu in gpus:\n    {self._tf}.config.experimental."
            return [_line(f"{text}set_memory_growth(gpu, True)")]
        if option == "gpu_options.visible_device_list":
            index = re.fullmatch(r"str\((.*)\)|[\"'](\d+)[\"']", value, re.DOTALL)
            if index is None:
                return None
            gpu = f"gpus[{index[1] or index[2]}]"
            text = f'{self._tf}.config.set_visible_devices({gpu}, "GPU")'
            return [_line(f"if gpus:\n    {text}")]
        threads = re.fullmatch(r"(intra|inter)_op_parallelism_threads", option)
        if threads:
            return [_line(f"{self._tf}.config.threading.set_{option}({value})")]
        return (
            [] if option in ("allow_soft_placement", "log_device_placement") else None
        )


def _mentions(node: cst.CSTNode, names: set[str]) -> bool:
    if isinstance(node, cst.FunctionDef) and assigns(node, names):
        return False
    return count_uses(node, names) > 0


def _only(line: cst.BaseStatement) -> cst.BaseSmallStatement | None:
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        return line.body[0]
    return None


def _trailing(line: Any) -> list[cst.EmptyLine]:
    """Return the comment at the end of a line, as a line above it."""
    end = getattr(line, "trailing_whitespace", None)
    return [cst.EmptyLine(comment=end.comment)] if end and end.comment else []


def _line(text: str) -> cst.BaseStatement:
    line = cst.parse_statement(text + "\n")
    assert isinstance(line, cst.BaseStatement)
    return line
