"""What the rules share about one file: its nodes, its names, and what they hold."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from keras_dist.tools.migrate.command import Finding

Node: TypeAlias = cst.BaseExpression
Values: TypeAlias = list[cst.BaseExpression | None]

# Classes of `keras.optimizers` that a script of Keras 2 may use.
OPTIMIZERS = {
    *("SGD", "RMSprop", "Adam", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl"),
    "AdamW",
}

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

_FUNCTIONS = (cst.Module, cst.FunctionDef)
_BLOCKS = (cst.Module, cst.IndentedBlock, cst.SimpleStatementSuite)

# Fields of nodes with words that are no names which are read.
_WORDS = (
    (cst.Attribute, "attr"),
    (cst.FunctionDef, "name"),
    (cst.ClassDef, "name"),
    (cst.Param, "name"),
    (cst.Arg, "keyword"),
    (cst.NameItem, "name"),
)


def dotted(node: cst.CSTNode | None) -> str | None:
    """Return the text of a name, or of names with dots between them; else `None`."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        value = dotted(node.value)
        return f"{value}.{node.attr.value}" if value else None
    return None


def dotted_node(name: str, value: Any = None) -> cst.Attribute | cst.Name:
    """Return the node of names with dots between them, as attributes of a value."""
    for word in map(cst.Name, name.split(".")):
        value = word if value is None else cst.Attribute(value=value, attr=word)
    return value


def method_of(call: cst.Call) -> str:
    """Return the name of a method that is called, or ""."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def owner_of(call: cst.Call) -> Any:
    """Return the object of which a method is called, or `None`."""
    return call.func.value if isinstance(call.func, cst.Attribute) else None


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields of a kind of nodes that hold neither spaces nor commas."""
    names = [field.name for field in dataclasses.fields(kind)]
    skipped = (
        *("whitespace", "trailing_", "leading_", "lines_", "lpar", "rpar", "comma"),
        *("semicolon", "equal", "dot", "header", "footer", "indent"),
    )
    return tuple(name for name in names if not name.startswith(skipped))


def inside(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the nodes of which a node consists, in the order of the text."""
    found: list[cst.CSTNode] = []
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, cst.CSTNode)]
    return found


def walk(node: cst.CSTNode, *, stop: type | tuple[()] = ()) -> Iterator[cst.CSTNode]:
    """Yield a node and all nodes in it, in the order of the text.

    libcst's visitors, and so its providers of parents, scopes and qualified names, copy
    the tree: on the scripts of our tests each takes as long as all rules together.

    Args:
        node: Where to begin.
        stop: Nodes of this kind are not entered, except the first node.
    """
    stack: list[Any] = [node]
    while stack:
        found = stack.pop()
        yield found
        if isinstance(found, stop) and found is not node:
            continue
        stack += reversed(inside(found))


def count_uses(scope: cst.CSTNode, names: set[str]) -> int:
    """Count uses of names in a scope; functions in it that assign them have others."""
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
    """Tell whether a function assigns one of these names, which is local then."""
    targets = [one.target for one in walk(node) if isinstance(one, cst.AssignTarget)]
    return any(dotted(target) in names for target in targets)


def canonical(name: str) -> str:
    """Return the one name of all modules that are the same to the rules.

    >>> canonical("tensorflow.keras.optimizers.SGD")
    'keras.optimizers.SGD'
    >>> canonical("horovod.tensorflow.keras.callbacks")
    'hvd.callbacks'
    """
    for module, same in _SAME:
        if name == module or name.startswith(f"{module}."):
            return same + name[len(module) :]
    return name


class Names:
    """Modules that a file imports, and the names by which the file knows them.

    As libcst's `QualifiedNameProvider`, but a name may also be assigned from another
    one, or come from a module of which all names are imported.

    Args:
        nodes: All nodes of the file.
    """

    def __init__(self, nodes: Sequence[cst.CSTNode]):
        self.local: dict[str, str] = {}
        self.modules: set[str] = set()
        self.stars: list[str] = []
        for node in nodes:
            if isinstance(node, (cst.Import, cst.ImportFrom)):
                self._add_import(node)
        for node in nodes:
            if isinstance(node, cst.Assign):
                self._add_alias(node)
        if any(
            isinstance(node, cst.Attribute) and self.of(node) == "keras"
            for node in nodes
        ):
            self.modules.add("keras")  # as `tf.keras`, which nobody imports then

    def _add_import(self, node: cst.Import | cst.ImportFrom) -> None:
        """`import keras`, `from keras import layers`, `from keras.layers import *`."""
        base = ""
        if isinstance(node, cst.ImportFrom):
            module = dotted(node.module)
            if node.relative or not module:
                return
            base = f"{module}."
        if isinstance(node.names, cst.ImportStar):
            self.stars.append(base[:-1])
            self.modules.add(base[:-1])
            return
        for alias in node.names:
            name = dotted(alias.name) or ""
            self.modules.add(base + name)
            local = dotted(alias.asname.name) if alias.asname else None
            if local is None and not base:
                name = name.split(".")[0]
            self.local[local or name] = base + name

    def _add_alias(self, node: cst.Assign) -> None:
        """`K = tf.keras.backend` is as good as an import."""
        found = self.raw(node.value) or self.of(node.value)
        target = dotted(node.targets[0].target)
        if found and target and "." not in target and len(node.targets) == 1:
            self.local.setdefault(target, found)

    def raw(self, node: cst.CSTNode | None) -> str | None:
        """Return the full name of a node, if it begins with a module of the file."""
        first, dot, rest = (dotted(node) or "").partition(".")
        return self.local[first] + dot + rest if first in self.local else None

    def of(self, node: cst.CSTNode | None) -> str | None:
        """Return the canonical name of a node that begins with a module of the file."""
        raw = self.raw(node)
        if raw is not None:
            return canonical(raw)
        first, dot, _ = (dotted(node) or "").partition(".")
        if not dot and first[:1].isupper():
            for module in map(canonical, self.stars):
                if module.startswith("keras."):
                    return f"{module}.{first}"
        return None

    def uses(self, *roots: str) -> bool:
        """Tell whether the file imports one of these, or a module of it."""
        found = {canonical(module).split(".")[0] for module in self.modules}
        return bool(found & set(roots))

    def uses_keras(self) -> bool:
        """Tell whether the file is about Keras, also through Horovod's layer."""
        layers = ("horovod.keras", "horovod.tensorflow.keras", "horovod.spark.keras")
        by_layer = any(module.startswith(layers) for module in self.modules)
        return by_layer or self.uses("keras", "keras_dist", "tf_keras")

    def local_name(self, module: str) -> str | None:
        """Return the name by which the file knows a module, if it does."""
        for local, name in self.local.items():
            if canonical(name) == module:
                return local
        return None


class Binding(NamedTuple):
    """An assignment of a name.

    Args:
        name: The name, which may have dots.
        target: The node that is assigned to.
        value: The value that it is assigned; `None` if it is not one value.
    """

    name: str
    target: cst.CSTNode
    value: cst.BaseExpression | None


class Script:
    """A file, its names, and what is found in it.

    Args:
        module: The file.
    """

    def __init__(self, module: cst.Module):
        self.module = module
        self.nodes = list(walk(module))
        self.parent = {child: node for node in self.nodes for child in inside(node)}
        self.names = Names(self.nodes)
        self.findings: list[Finding] = []
        self.new_imports: list[tuple[str, str]] = []
        self.handled: set[cst.CSTNode] = set()
        self.calls = [node for node in self.nodes if isinstance(node, cst.Call)]
        self.functions = {
            node.name.value
            for node in self.nodes
            if isinstance(node, (cst.FunctionDef, cst.ClassDef))
        }
        self.in_imports = {
            inner
            for node in self.nodes
            if isinstance(node, (cst.Import, cst.ImportFrom))
            for inner in walk(node)
        }
        self._number = {node: number for number, node in enumerate(self.nodes)}
        self._made: dict[str, set[str]] = {}
        self._values: dict[str, Values] = {}
        self._bindings: dict[tuple[str, cst.CSTNode], list[Binding]] = {}
        self._bind_all()

    def leave(self, node: cst.CSTNode, reason: str, advice: str) -> None:
        """Note that a line cannot be changed, and what to write instead."""
        self.findings.append(Finding(self.line(node), reason, advice))

    def note(self, node: cst.CSTNode, reason: str, advice: str) -> None:
        """Note what a person should know about a line that needs no change."""
        self.findings.append(Finding(self.line(node), reason, advice, is_left=False))

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of the node's first line, from 1."""
        found: Any = self._positions.get(node)
        return found.start.line if found is not None else 1

    @functools.cached_property
    def _positions(self) -> Any:
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        return wrapper.resolve(PositionProvider)

    def _around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield a node and all nodes around it, from the inside."""
        found: cst.CSTNode | None = node
        while found is not None:
            yield found
            found = self.parent.get(found)

    def function_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the innermost function around a node, or the file."""
        return next(one for one in self._around(node) if isinstance(one, _FUNCTIONS))

    def _loops(self, node: cst.CSTNode) -> set[cst.CSTNode]:
        """Return the loops around a node in its function."""
        found: set[cst.CSTNode] = set()
        for one in self._around(node):
            if isinstance(one, _FUNCTIONS):
                break
            if isinstance(one, (cst.For, cst.While)):
                found.add(one)
        return found

    def is_in_loop(self, node: cst.CSTNode) -> bool:
        """Tell whether a node is in a loop of its function."""
        return bool(self._loops(node))

    def is_guarded(self, node: cst.CSTNode) -> bool:
        """Tell whether the file handles the case that a name is missing."""
        around = list(self._around(node))
        return any(
            isinstance(outer, cst.Try)
            and inner is outer.body
            and any(map(_is_of_names, outer.handlers))
            for inner, outer in zip(around, around[1:], strict=False)
        )

    def is_longest(self, node: cst.CSTNode) -> bool:
        """Tell whether a name has no further dot behind it."""
        parent = self.parent.get(node)
        return not (isinstance(parent, cst.Attribute) and parent.value is node)

    def is_called(self, node: cst.CSTNode) -> bool:
        """Tell whether a node is the function of a call."""
        parent = self.parent.get(node)
        return isinstance(parent, cst.Call) and parent.func is node

    def is_call(self, node: cst.CSTNode | None, name: str) -> bool:
        """Tell whether a node calls a function without arguments, as `hvd.size()`."""
        is_plain = isinstance(node, cst.Call) and not node.args
        return is_plain and self.names.of(node.func) == name  # type: ignore[union-attr]

    def is_read(self, node: cst.CSTNode) -> bool:
        """Tell whether a node is a name that is read: not assigned, and no keyword."""
        if not isinstance(node, (cst.Name, cst.Attribute)) or node in self.in_imports:
            return False
        one: cst.CSTNode = node
        parent = self.parent.get(one)
        for kind, field in _WORDS:
            if isinstance(parent, kind) and getattr(parent, field) is node:
                return False
        while isinstance(parent, (cst.BaseElement, cst.Tuple, cst.List)):
            one, parent = parent, self.parent.get(parent)
        is_target = isinstance(parent, (cst.AssignTarget, cst.AnnAssign, cst.For))
        return not (is_target and parent.target is one)  # type: ignore[union-attr]

    def is_shadowed(self, node: cst.CSTNode) -> bool:
        """Tell whether the file assigns the name of a module, such as a parameter."""
        first = (dotted(node) or "").partition(".")[0]
        return any(
            value is None or self.names.of(value) is None
            for value in self.values(first)
        )

    def is_optimizer(self, node: cst.BaseExpression) -> bool:
        """Tell whether an expression is an optimizer, by its name or by its maker."""
        name = dotted(node)
        if isinstance(node, cst.Subscript):
            return self._made.get(dotted(node.value) or "") == {"optimizers"}
        if name is None:
            return isinstance(node, cst.Attribute) and node.attr.value == "optimizer"
        if name.rpartition(".")[2].lstrip("_") == "optimizer":
            return True
        return self._made.get(name) == {"optimizer"}

    def is_model(self, node: cst.BaseExpression) -> bool:
        """Tell whether an expression is a model, by its name or by its maker."""
        name = dotted(node) or ""
        if name.rpartition(".")[2].lstrip("_") == "model":
            return True
        return self._made.get(name) == {"model"}

    def optimizer_class(self, call: cst.Call) -> str | None:
        """Return "SGD" for `keras.optimizers.SGD(…)`, legacy or not; else `None`."""
        module, _, name = (self.names.of(call.func) or "").rpartition(".")
        known = ("keras.optimizers", "keras.optimizers.legacy")
        return name if module in known and name in OPTIMIZERS else None

    def is_optimizer_class(self, node: cst.BaseExpression) -> bool:
        """Tell whether an expression gives one of several classes of optimizers.

        As `getattr(keras.optimizers, name)`, `{"sgd": SGD, "adam": Adam}[name]`.
        """
        if isinstance(node, cst.Call):
            return self._mentions_optimizers(node)
        is_item = isinstance(node, cst.Subscript)
        named = node.value if isinstance(node, cst.Subscript) else node
        name = dotted(named)
        if not is_item and (name is None or self.names.of(node) is not None):
            return False
        values: Values = self.values_at(name, named) if name else [named]
        return bool(values) and all(
            value is not None
            and (not is_item or isinstance(value, cst.Dict))
            and self._mentions_optimizers(value)
            for value in values
        )

    def _mentions_optimizers(self, node: cst.CSTNode) -> bool:
        """Tell whether a class of `keras.optimizers` is in it, and none is called."""
        names = [self.names.of(one) or "" for one in walk(node)]
        calls = [one for one in walk(node) if isinstance(one, cst.Call)]
        is_made = any(self.optimizer_class(one) is not None for one in calls)
        is_there = any(f"{name}.".startswith("keras.optimizers.") for name in names)
        return is_there and not is_made and not any("schedules" in n for n in names)

    def is_known_before(self, value: cst.BaseExpression, node: cst.CSTNode) -> bool:
        """Tell whether a node can compute a value: of numbers and names set once."""
        plain = (cst.Integer, cst.BinaryOperation, cst.BaseBinaryOp, cst.Attribute)
        end = self._number[node]
        for one in walk(value):
            if isinstance(one, cst.Call) and self.names.of(one.func) == "hvd.size":
                continue
            if isinstance(one, cst.Name):
                values = self.values(one.value)
                first = values[0] if len(values) == 1 else None
                is_set = first is not None and self._number[first] < end
                is_module = one.value in self.names.local
                if not (is_module or is_set or one.value == "size"):
                    return False
            elif not isinstance(one, plain):
                return False
        return True

    def values(self, name: str) -> Values:
        """Return all that the file assigns to a name; `None` for what is no value."""
        return self._values.get(name, [])

    def assigned(self) -> list[str]:
        """Return all names to which the file assigns something."""
        return list(self._values)

    def reads(self, name: str) -> list[cst.CSTNode]:
        """Return all nodes that read a name, which may have dots."""
        return self._reads.get(name, [])

    @functools.cached_property
    def _reads(self) -> dict[str, list[cst.CSTNode]]:
        found: dict[str, list[cst.CSTNode]] = {}
        for node in self.nodes:
            name = dotted(node) if self.is_read(node) else None
            if name is not None:
                found.setdefault(name, []).append(node)
        return found

    def values_at(self, name: str, node: cst.CSTNode) -> Values:
        """Return the values that a name may have where a node of the file reads it."""
        if "." in name:
            return self.values(name)  # an attribute, of all functions
        innermost = self.function_of(node)
        for scope in self._around(node):
            found = self._bindings.get((name, scope))
            if found is not None:
                found = self._reaching(found, node) if scope is innermost else found
                return [binding.value for binding in found]
        return []

    def values_of(self, node: Node | None) -> Sequence[Node | None]:
        """Return the values that an expression may have, by its names; or itself."""
        name = dotted(node)
        if node is None or name is None:
            return [node]
        return self.values_at(name, node)

    def maker(self, value: cst.CSTNode | None) -> str | None:
        """Return the name of the function that a value is the result of, if any."""
        return self.names.of(value.func) if isinstance(value, cst.Call) else None

    def _reaching(self, found: list[Binding], node: cst.CSTNode) -> list[Binding]:
        """Return those assignments in the function of a node that are up to date."""
        blocks = {one for one in self._around(node) if isinstance(one, _BLOCKS)}
        last: list[Binding] = []
        for binding in found:
            # The value is computed before the name has it.
            *_, end = walk(binding.value or binding.target)
            is_before = self._number[end] < self._number[node]
            around = self._around(binding.target)
            block = next(one for one in around if isinstance(one, _BLOCKS))
            if is_before and block in blocks:
                last = []  # executed in any case, and after the ones before
            if is_before or self._loops(binding.target) & self._loops(node):
                last.append(binding)
        return last or found

    def _bind_all(self) -> None:
        """Collect all assignments; an import gives a name no value."""
        shared = {
            item.name.value
            for node in self.nodes
            if isinstance(node, (cst.Global, cst.Nonlocal))
            for item in node.names
        }
        for node in self.nodes:
            if node in self.in_imports:
                continue
            for name, target, value in _bindings(node):
                scope = self.module if name in shared else self.function_of(target)
                binding = Binding(name, target, value)
                self._bindings.setdefault((name, scope), []).append(binding)
                self._values.setdefault(name, []).append(value)
                self._made.setdefault(name, set()).add(self._kind(value))

    def _kind(self, value: cst.BaseExpression | None) -> str:
        """Return what a value is: "optimizer", "optimizers", "model" or "other"."""
        if isinstance(value, (cst.Dict, cst.List, cst.Tuple)):
            kinds = {self._kind(getattr(one, "value", None)) for one in value.elements}
            return "optimizers" if kinds == {"optimizer"} else "other"
        if not isinstance(value, cst.Call):
            return "other"
        name = self.names.of(value.func) or ""
        if name.startswith("keras.optimizers.") and "schedules" not in name:
            return "optimizer"
        if name in ("hvd.DistributedOptimizer", "hvd.PartialDistributedOptimizer"):
            return "optimizer"
        is_model = name.rpartition(".")[2] in ("Sequential", "Model", "load_model")
        if is_model or name.startswith("keras.applications."):
            return "model"
        return "other"


def _bindings(node: cst.CSTNode) -> Iterator[Binding]:
    """Yield what a statement, a parameter or a part of an expression assigns."""
    if isinstance(node, cst.Assign):
        for target in node.targets:
            yield from _bound(target.target, node.value)
    elif isinstance(node, cst.AnnAssign) and node.value is not None:
        yield from _bound(node.target, node.value)
    elif isinstance(node, (cst.AugAssign, cst.For, cst.CompFor)):
        yield from _bound(node.target, None)  # what the file does not say
    elif isinstance(node, (cst.Param, cst.AsName)):
        yield from _bound(node.name, None)


def _bound(target: cst.CSTNode, value: cst.BaseExpression | None) -> Iterator[Binding]:
    if isinstance(target, (cst.Tuple, cst.List)):
        values: Sequence[Any] = [None] * len(target.elements)
        if isinstance(value, (cst.Tuple, cst.List)):
            own = [one.value for one in value.elements]
            values = own if len(own) == len(values) else values
        for element, inner in zip(target.elements, values, strict=True):
            yield from _bound(element.value, inner)
    name = dotted(target)
    if name is not None:
        yield Binding(name, target, value)


def _is_of_names(handler: cst.ExceptHandler) -> bool:
    """Tell whether an `except` is for a missing name."""
    known = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"}
    names = [dotted(one) for one in walk(handler.type)] if handler.type else [*known]
    return not known.isdisjoint(names)
