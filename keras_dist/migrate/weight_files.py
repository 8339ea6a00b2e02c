"""Names of files of weights, which Keras 3 wants to end in `.weights.h5`."""

import os
import re
from collections.abc import Iterator
from typing import TypeAlias

import libcst as cst

from keras_dist.migrate.arguments import keyword, literal, passed
from keras_dist.migrate.names import dotted, inside
from keras_dist.migrate.script import Script

_SUFFIX = ".weights.h5"
_KERAS_3 = (_SUFFIX, ".weights.json")  # the second one names shards
_OLD = re.compile(r"(\.weights)?\.(h5|hdf5|hd5|ckpt|tf|keras|weights)$")

# What ModelCheckpoint takes for whole models, and what it took for the same format.
_WHOLE = (".keras", ".h5")
_HDF5 = re.compile(r"\.(hdf5|hd5)$")

_OF_MODELS = {
    f"{module}.{name}"
    for module in ("keras.models", "keras.saving")
    for name in ("load_model", "save_model")
} | {"hvd.load_model"}

Text: TypeAlias = cst.SimpleString | cst.FormattedStringText


def new_name(name: str) -> str:
    """The name of a file of weights on Keras 3.

    >>> new_name("best-{epoch}.h5"), new_name("weights"), new_name("a.weights.h5")
    ('best-{epoch}.weights.h5', 'weights.weights.h5', 'a.weights.h5')
    """
    return name if name.endswith(_KERAS_3) else _OLD.sub("", name) + _SUFFIX


class WeightFiles:
    """Finds the texts with which names of files of weights end.

    Args:
        script: The file.
    """

    def __init__(self, script: Script):
        self._script = script
        self._weights: list[Text] = []
        self._models: list[Text] = []
        self._checkpoints: list[Text] = []
        self._loads: list[tuple[cst.Call, list[Text] | None]] = []
        self._defaults = _Defaults(script)
        for node in script.nodes:
            if isinstance(node, cst.Call):
                self._look(node)

    def _look(self, node: cst.Call) -> None:
        """`model.save_weights(name)`, and `ModelCheckpoint`."""
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
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
                self._models += self._ends(arg.value) or ()

    def changes(self) -> tuple[dict[Text, str], dict[str, str]]:
        """New texts: for some nodes, and for each string that equals one of them."""
        nodes: dict[Text, str] = {}
        names: dict[str, str] = {}
        taken = {_value(text) for text in self._models}
        for text in self._weights:
            old = _value(text)
            if new_name(old) == old:
                continue
            if old in taken:
                self._script.left(
                    text,
                    f"{old!r} is the name of a file of weights, and of a whole model",
                    f"Name the file of weights {new_name(old)!r}",
                )
            else:
                nodes[text] = new_name(old)
                if isinstance(text, cst.SimpleString) and not old.startswith("."):
                    names[old] = new_name(old)
        self._change_checkpoints(nodes, names)
        self._check_loads(nodes, names)
        return nodes, names

    def _change_checkpoints(
        self, nodes: dict[Text, str], names: dict[str, str]
    ) -> None:
        for text in self._checkpoints:
            old = _value(text)
            if _HDF5.search(old):
                nodes[text] = _HDF5.sub(".h5", old)
                if isinstance(text, cst.SimpleString) and not old.startswith("."):
                    names[old] = nodes[text]
            elif not old.endswith(_WHOLE):
                self._script.left(
                    text,
                    f"ModelCheckpoint of Keras 3 writes no folder, as {old!r} is",
                    "End the name in .keras, also where it is loaded",
                )

    def _check_loads(self, nodes: dict[Text, str], names: dict[str, str]) -> None:
        for call, texts in self._loads:
            if texts is None and nodes:
                self._script.note(
                    call,
                    "the name of the file to load is not in this file, and names of "
                    "files of weights are changed",
                    "End it in .weights.h5, if this script or an earlier run wrote it",
                )
            for text in texts or ():
                old = _value(text)
                known = text in nodes or old in names or "." in old.rpartition("/")[2]
                if not known:
                    self._script.left(
                        text,
                        f"Keras 3 reads no checkpoint of TensorFlow, as {old!r} is",
                        "Load it with Keras 2, and save it to a file .weights.h5",
                    )

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
        """The texts that an expression may end with; `None` if it is not known."""
        if depth > 8:
            return None
        if isinstance(node, cst.SimpleString):
            return [node] if not node.prefix.lower().startswith("b") else None
        if isinstance(node, cst.FormattedString):
            last = inside(node)[-1] if inside(node) else None
            return [last] if isinstance(last, cst.FormattedStringText) else None
        if isinstance(node, (cst.Name, cst.Attribute)):
            return self._ends_of_name(node, depth)
        inner = self._last(node)
        return self._ends(inner, depth + 1) if inner is not None else None

    def _last(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """The operand with which a text that is put together ends."""
        if isinstance(node, cst.ConcatenatedString):
            return node.right
        if isinstance(node, cst.BinaryOperation):
            is_format = isinstance(node.operator, cst.Modulo)
            return node.left if is_format else node.right
        if not isinstance(node, cst.Call) or not node.args:
            return None
        name = dotted(node.func) or ""
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == "format":
            return node.func.value
        if name in ("os.path.join", "str", "Path", "pathlib.Path"):
            return node.args[-1].value
        return None

    def _ends_of_name(self, node: cst.BaseExpression, depth: int) -> list[Text] | None:
        name = dotted(node)
        if name is None:
            return None
        values = self._script.values_at(name, node)
        if not values and "." in name:
            values = list(self._defaults.of(name.rpartition(".")[2]))
        found: list[Text] = []
        for value in values:
            texts = self._ends(value, depth + 1) if value is not None else None
            if texts is None:
                return None
            found += texts
        return found or None


class _Defaults:
    """Defaults of options: `parser.add_argument("--weights", default="a.h5")`."""

    def __init__(self, script: Script):
        adds = ("add_argument", "add_option")
        self._calls = [
            node
            for node in script.nodes
            if isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value in adds
        ]

    def of(self, name: str) -> Iterator[cst.BaseExpression]:
        """The defaults of the options that are stored under a name."""
        for call in self._calls:
            words = [literal(arg.value) for arg in call.args if arg.keyword is None]
            names = {str(word).lstrip("-").replace("-", "_") for word in words}
            default = keyword(call, "default")
            if name in names and default is not None:
                yield default.value


def _value(text: Text) -> str:
    if isinstance(text, cst.FormattedStringText):
        return text.value
    return str(text.evaluated_value)


def with_text(node: Text, new: str) -> Text:
    """The same text with another value, in the same quotes."""
    if isinstance(node, cst.FormattedStringText):
        return node.with_changes(value=new)
    old, raw = str(node.evaluated_value), node.raw_value
    same = len(os.path.commonprefix([old, new]))
    # Escapes are before the ending, which alone changes.
    stem = raw[: len(raw) - (len(old) - same)]
    return node.with_changes(
        value=f"{node.prefix}{node.quote}{stem}{new[same:]}{node.quote}"
    )
