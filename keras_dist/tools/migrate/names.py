"""Which names of a file are Keras's, TensorFlow's or Horovod's."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst

# Modules that are the same to the rules: `hvd` stands for Horovod's Keras layer, and
# for ours; `tf1` for what TensorFlow 2 has under `compat.v1` alone.
_SAME = (
    ("horovod.tensorflow.keras", "hvd"),
    ("horovod.tensorflow", "hvd"),
    ("horovod.keras", "hvd"),
    ("keras_dist.horovod", "hvd"),
    ("tensorflow.compat.v1.keras", "keras"),
    ("tensorflow.python.keras", "keras"),
    ("tensorflow.keras", "keras"),
    ("keras.api", "keras"),
    ("tensorflow.optimizers", "keras.optimizers"),
    ("tensorflow.losses", "keras.losses"),
    ("tensorflow.compat.v1", "tf1"),
    ("tensorflow", "tf"),
)


def dotted(node: cst.CSTNode | None) -> str | None:
    """The text of a name, or of names with dots between them; else `None`."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        value = dotted(node.value)
        return f"{value}.{node.attr.value}" if value else None
    return None


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """The fields of a node with nodes that mean something: no spaces, no commas."""
    names = [field.name for field in dataclasses.fields(kind)]
    skipped = (
        *("whitespace", "trailing_", "leading_", "lines_", "lpar", "rpar", "comma"),
        *("semicolon", "equal", "dot", "header", "footer", "indent"),
    )
    return tuple(name for name in names if not name.startswith(skipped))


def inside(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The nodes of which a node consists, in the order of the text."""
    found: list[cst.CSTNode] = []
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, cst.CSTNode)]
    return found


def walk(node: cst.CSTNode, *, stop: type | tuple[()] = ()) -> Iterator[cst.CSTNode]:
    """A node and all in it, in the order of the text.

    libcst's own visitors build the tree anew, which takes ten times as long.

    Args:
        node: Where to begin.
        stop: Nodes of this kind are not entered, but the first.
    """
    stack: list[Any] = [node]
    while stack:
        found = stack.pop()
        yield found
        if isinstance(found, stop) and found is not node:
            continue
        stack += reversed(inside(found))


def count_uses(scope: cst.CSTNode, names: set[str]) -> int:
    """How often a scope uses names; functions inside that assign them have others."""
    number = 0
    stack = [scope]
    while stack:
        node = stack.pop()
        is_inner = isinstance(node, cst.FunctionDef) and node is not scope
        if is_inner and assigns(node, names):
            continue
        if isinstance(node, cst.Name):
            number += node.value in names
        elif isinstance(node, (cst.Attribute, cst.Arg)):
            stack.append(node.value)  # not what is behind a dot, nor a keyword
        else:
            stack += inside(node)
    return number


def assigns(node: cst.CSTNode, names: set[str]) -> bool:
    """Whether a function assigns one of these names, which is its own then."""
    targets = [one.target for one in walk(node) if isinstance(one, cst.AssignTarget)]
    return any(dotted(target) in names for target in targets)


def canonical(name: str) -> str:
    """One name for all modules that are the same to the rules.

    >>> canonical("tensorflow.keras.optimizers.SGD")
    'keras.optimizers.SGD'
    >>> canonical("horovod.tensorflow.keras.callbacks")
    'hvd.callbacks'
    """
    for module, same in _SAME:
        if name == module or name.startswith(f"{module}."):
            return same + name[len(module) :]
    return name


def imported(node: cst.Import | cst.ImportFrom) -> Iterator[tuple[str, str]]:
    """Each local name that an import makes, and what it stands for."""
    if isinstance(node.names, cst.ImportStar):
        return
    base = ""
    if isinstance(node, cst.ImportFrom):
        if node.relative or node.module is None:
            return
        base = f"{dotted(node.module)}."
    for alias in node.names:
        name = dotted(alias.name) or ""
        local = dotted(alias.asname.name) if alias.asname else None
        if local is None and not base:
            name = local = name.split(".")[0]
        yield local or name, base + name


class Names:
    """The modules that a file imports, and the short names that it gives them.

    Args:
        nodes: All nodes of the file.
    """

    def __init__(self, nodes: Sequence[cst.CSTNode]):
        self.local: dict[str, str] = {}
        self.modules: set[str] = set()
        self.stars: list[str] = []
        self.raw_stars: list[str] = []
        for node in nodes:
            if isinstance(node, cst.Import):
                self.modules |= {dotted(alias.name) or "" for alias in node.names}
                self.local |= dict(imported(node))
            elif isinstance(node, cst.ImportFrom):
                self._add_from(node)
        for node in nodes:
            if isinstance(node, cst.Assign):
                self._add_alias(node)
        if any(
            isinstance(node, cst.Attribute) and self.of(node) == "keras"
            for node in nodes
        ):
            self.modules.add("keras")  # as `tf.keras`, which nobody imports then

    def _add_from(self, node: cst.ImportFrom) -> None:
        """`from keras import layers`, `from keras.optimizers import *`."""
        module = dotted(node.module)
        if node.relative or not module:
            return
        if isinstance(node.names, cst.ImportStar):
            self.stars.append(canonical(module))
            self.raw_stars.append(module)
            self.modules.add(module)
        else:
            self.modules |= {f"{module}.{dotted(one.name)}" for one in node.names}
        self.local |= dict(imported(node))

    def _add_alias(self, node: cst.Assign) -> None:
        """`K = tf.keras.backend` is as good as an import."""
        found = self.raw(node.value) or self.of(node.value)
        target = dotted(node.targets[0].target)
        if found and target and "." not in target and len(node.targets) == 1:
            self.local.setdefault(target, found)

    def raw(self, node: cst.CSTNode | None) -> str | None:
        """The full name of a node, if it begins with a module of the file."""
        first, dot, rest = (dotted(node) or "").partition(".")
        return self.local[first] + dot + rest if first in self.local else None

    def of(self, node: cst.CSTNode | None) -> str | None:
        """The canonical name of a node, if it begins with a module of the file."""
        raw = self.raw(node)
        if raw is not None:
            return canonical(raw)
        first, dot, _ = (dotted(node) or "").partition(".")
        if not dot and first[:1].isupper():
            for module in self.stars:
                if module.startswith("keras."):
                    return f"{module}.{first}"
        return None

    def uses(self, *roots: str) -> bool:
        """Whether the file imports one of these, or a module of it."""
        found = {canonical(module).split(".")[0] for module in self.modules}
        return bool(found & set(roots))

    def uses_keras(self) -> bool:
        """Whether the file is about Keras, by itself or through Horovod's layer."""
        layers = ("horovod.keras", "horovod.tensorflow.keras", "horovod.spark.keras")
        by_layer = any(module.startswith(layers) for module in self.modules)
        return by_layer or self.uses("keras", "keras_dist", "tf_keras")

    def local_name(self, module: str) -> str | None:
        """The name under which the file knows a module, if it does."""
        for local, name in self.local.items():
            if canonical(name) == module:
                return local
        return None
