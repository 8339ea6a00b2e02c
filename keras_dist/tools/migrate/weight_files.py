"""Names of files of weights, which have to end in `.weights.h5` for Keras 3."""

import os
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import libcst as cst

from keras_dist.tools.migrate.arguments import keyword, literal, passed
from keras_dist.tools.migrate.script import Script, dotted, inside, method_of, owner_of

_SUFFIX = ".weights.h5"
_KERAS_3 = (_SUFFIX, ".weights.json")  # the second one names shards
_OLD = re.compile(r"(\.weights)?\.(h5|hdf5|hd5|ckpt|tf|keras|weights)$")

# What ModelCheckpoint takes for whole models, and what it took for the same format.
_WHOLE = (".keras", ".h5")
_HDF5 = re.compile(r"\.(hdf5|hd5)$")
# What Keras 3 reads weights from.
_READ = (".h5", ".hdf5", ".keras", ".weights.json")
# The fields of a name such as "{epoch:02d}" or "%d", and what they may become.
_FIELD = re.compile(r"\\\{.*?\\\}|%[0-9.]*[a-z]")

_OF_MODELS = {
    f"{module}.{name}"
    for module in ("keras.models", "keras.saving")
    for name in ("load_model", "save_model")
} | {"hvd.load_model"}

Text: TypeAlias = cst.SimpleString | cst.FormattedStringText


def new_name(name: str) -> str:
    """Return the name of a file of weights on Keras 3.

    >>> new_name("best-{epoch}.h5"), new_name("weights"), new_name("a.weights.h5")
    ('best-{epoch}.weights.h5', 'weights.weights.h5', 'a.weights.h5')
    """
    return name if name.endswith(_KERAS_3) else _OLD.sub("", name) + _SUFFIX


class WeightFiles:
    """Find the texts with which names of files of weights end.

    Args:
        script: The file.
    """

    def __init__(self, script: Script):
        self._script = script
        self._weights: list[Text] = []
        self._models: list[Text] = []
        self._checkpoints: list[Text] = []
        self._loads: list[tuple[cst.Call, list[Text] | None]] = []
        self._loaded_models: list[Text] = []
        # Texts before which there is more of a name, and what is before them.
        self._before: dict[Text, str] = {}
        for call in script.calls:
            self._look(call)

    def _look(self, node: cst.Call) -> None:
        """`model.save_weights(name)`, and `ModelCheckpoint`."""
        method = method_of(node)
        if self._script.names.of(node.func) == "keras.callbacks.ModelCheckpoint":
            only = keyword(node, "save_weights_only")
            is_weights = only is not None and literal(only.value) is not False
            name = passed(node, "filepath", 0)
            if is_weights:
                self._add_weights(node)
            elif name is not None:
                found = self._ends(name) or []
                self._models += found
                self._checkpoints += found
        elif method == "save_weights":
            self._add_weights(node)
        elif method == "load_weights":
            name = passed(node, "filepath", 0)
            self._loads.append((node, self._ends(name) if name is not None else None))
        elif method == "save" or self._script.names.of(node.func) in _OF_MODELS:
            self._add_model(node)

    def _add_model(self, node: cst.Call) -> None:
        """`model.save(name)`, `load_model(name)`, `save_model(model, name)`.

        Whatever has a method `save` is taken for a model: what it is called with is
        not the name of a file of weights.
        """
        for index, arg in enumerate(node.args):
            is_path = arg.keyword is None and index < 2
            if is_path or (arg.keyword and arg.keyword.value == "filepath"):
                found = self._ends(arg.value) or []
                self._models += found
                if (dotted(node.func) or "").endswith("load_model"):
                    self._loaded_models += found
                elif isinstance(node.func, cst.Attribute):
                    self._list_folder(node, found)

    def _list_folder(self, node: cst.Call, found: list[Text]) -> None:
        """`model.save("folder")`."""
        if method_of(node) != "save" or not self._script.is_model(owner_of(node)):
            return
        for text in found:
            if not _value(text).endswith((*_WHOLE, ".hdf5")):
                reason = f"save of Keras 3 writes no folder, as {_value(text)!r} is"
                advice = "End the name in .keras, or use model.export"
                self._script.leave(node, reason, advice)

    def changes(self) -> tuple[dict[Text, str], dict[str, str]]:
        """Return new texts: of some nodes, and of each string equal to one of them."""
        nodes: dict[Text, str] = {}
        names: dict[str, str] = {}
        taken = {_value(text) for text in self._models}
        for text in self._weights:
            old = _value(text)
            if new_name(old) == old:
                continue
            if old in taken:
                self._script.leave(
                    text,
                    f"{old!r} is the name of a file of weights, and of a whole model",
                    f"Name the file of weights {new_name(old)!r}",
                )
            else:
                nodes[text] = new_name(old)
                if isinstance(text, cst.SimpleString) and not old.startswith("."):
                    names[old] = new_name(old)
        self._check_loads(nodes, names)
        checkpoints = self._change_checkpoints(names)
        for text in self._loaded_models:
            if self._is_one_of(text, checkpoints):
                nodes[text] = _HDF5.sub(".h5", _value(text))
        return nodes | checkpoints, names

    def _change_checkpoints(self, names: dict[str, str]) -> dict[Text, str]:
        nodes: dict[Text, str] = {}
        for text in self._checkpoints:
            old = _value(text)
            if _HDF5.search(old):
                nodes[text] = _HDF5.sub(".h5", old)
                if isinstance(text, cst.SimpleString) and not old.startswith("."):
                    names[old] = nodes[text]
            elif not old.endswith(_WHOLE):
                self._script.leave(
                    text,
                    f"ModelCheckpoint of Keras 3 writes no folder, as {old!r} is",
                    "End the name in .keras, also where it is loaded",
                )
        return nodes

    def _check_loads(self, nodes: dict[Text, str], names: dict[str, str]) -> None:
        saved = dict(nodes)
        for call, texts in self._loads:
            if texts is None and nodes:
                self._script.leave(
                    call,
                    "the name of the file to load is not in this file, and names of "
                    "files of weights are changed",
                    "End it in .weights.h5, if this script or an earlier run wrote it",
                )
            for text in texts or ():
                old = _value(text)
                if text not in nodes and self._is_one_of(text, saved):
                    nodes[text] = new_name(old)
                if text not in nodes and old not in names and not old.endswith(_READ):
                    self._script.leave(
                        text,
                        f"Keras 3 reads no checkpoint of TensorFlow, as {old!r} is",
                        "Load it with Keras 2, and save it to a file .weights.h5",
                    )

    def _is_one_of(self, text: Text, saved: Iterable[Text]) -> bool:
        """Tell whether a file that is loaded is one that is saved, in whatever folder.

        Its name may have numbers where the other one has `{epoch}`. Where only the end
        of a name is known, this has to be more than ".h5".
        """
        own, is_own_partial = self._last_word(text)
        for other in saved:
            name, is_partial = self._last_word(other)
            if not _OLD.sub("", name) or not _OLD.sub("", own):
                if (own, self._before.get(text)) == (name, self._before.get(other)):
                    return True
                continue
            pattern = _FIELD.sub(".*", re.escape(name))
            if re.fullmatch(".*" * is_partial + pattern, own):
                return True
            if is_own_partial and name.endswith(own):
                return True
        return False

    def _last_word(self, text: Text) -> tuple[str, bool]:
        """Return what is behind the last slash, and whether a part of it is unknown."""
        _, slash, name = _value(text).rpartition("/")
        return name, not slash and text in self._before

    def _add_weights(self, call: cst.Call) -> None:
        name = passed(call, "filepath", 0)
        texts = self._ends(name) if name is not None else None
        if texts is not None:
            self._weights += texts
        elif name is not None:
            self._script.note(
                call,
                "Keras 3 wants names of files of weights to end in .weights.h5, and "
                "this one is made elsewhere",
                "End it in .weights.h5 where it is made",
            )

    def _ends(self, node: cst.BaseExpression, depth: int = 0) -> list[Text] | None:
        """Return the texts that an expression may end with; `None` if unknown."""
        if depth > 8:
            return None
        if isinstance(node, cst.SimpleString):
            return [node] if not node.prefix.lower().startswith("b") else None
        if isinstance(node, cst.FormattedString):
            *before, last = [node, *inside(node)]
            if not isinstance(last, cst.FormattedStringText):
                return None
            if len(before) > 1:
                self._before[last] = self._code(*before[1:])
            return [last]
        if isinstance(node, (cst.Name, cst.Attribute)):
            return self._ends_of_name(node, depth)
        inner = self._last(node)
        found = self._ends(inner, depth + 1) if inner is not None else None
        if isinstance(node, (cst.BinaryOperation, cst.ConcatenatedString)):
            for text in found or ():
                if inner is not node.left:
                    self._before.setdefault(text, self._code(node.left))
        return found

    def _code(self, *nodes: cst.CSTNode) -> str:
        return "".join(map(self._script.module.code_for_node, nodes))

    def _last(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return the operand with which a composed text ends."""
        if isinstance(node, cst.ConcatenatedString):
            return node.right
        if isinstance(node, cst.BinaryOperation):
            is_format = isinstance(node.operator, cst.Modulo)
            return node.left if is_format else node.right
        if not isinstance(node, cst.Call) or not node.args:
            return None
        name = dotted(node.func) or ""
        if method_of(node) == "format":
            return owner_of(node)
        if name in ("os.path.join", "str", "Path", "pathlib.Path"):
            return node.args[-1].value
        return None

    def _ends_of_name(self, node: cst.BaseExpression, depth: int) -> list[Text] | None:
        name = dotted(node)
        if name is None:
            return None
        values = self._script.values_at(name, node)
        if not values and "." in name:
            values = list(self._defaults(name.rpartition(".")[2]))
        found: list[Text] = []
        for value in values:
            texts = self._ends(value, depth + 1) if value is not None else None
            if texts is None:
                return None
            found += texts
        return found or None

    def _defaults(self, name: str) -> Iterator[cst.BaseExpression]:
        """Yield the defaults of the options of the command line with this name."""
        for call in self._script.calls:
            if method_of(call) in ("add_argument", "add_option"):
                words = [literal(arg.value) for arg in call.args if not arg.keyword]
                names = {str(word).lstrip("-").replace("-", "_") for word in words}
                default = keyword(call, "default")
                if name in names and default is not None:
                    yield default.value


def _value(text: Text) -> str:
    if isinstance(text, cst.FormattedStringText):
        return text.value
    return str(text.evaluated_value)


def with_text(node: Text, new: str) -> Text:
    """Return the text with another value, in the same quotes."""
    if isinstance(node, cst.FormattedStringText):
        return node.with_changes(value=new)
    old, raw = str(node.evaluated_value), node.raw_value
    same = len(os.path.commonprefix([old, new]))
    # Escapes are before the ending, which alone changes.
    stem = raw[: len(raw) - (len(old) - same)]
    return node.with_changes(
        value=f"{node.prefix}{node.quote}{stem}{new[same:]}{node.quote}"
    )
