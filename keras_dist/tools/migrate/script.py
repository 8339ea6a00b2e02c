"""What the rules share about one file."""

import functools
from collections.abc import Mapping, Sequence

import libcst as cst

from keras_dist.tools.migrate.names import Names, dotted, walk
from keras_dist.tools.migrate.report import Finding
from keras_dist.tools.migrate.scopes import Binding, Scopes

# Classes of `keras.optimizers` that a script of Keras 2 may use.
OPTIMIZERS = {
    *("SGD", "RMSprop", "Adam", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl"),
    "AdamW",
}


class Script:
    """A file, its names, and what is found in it.

    Args:
        module: The file.
        positions: Where each node of it begins and ends.
    """

    def __init__(self, module: cst.Module, positions: Mapping[cst.CSTNode, object]):
        self.module = module
        self.nodes = list(walk(module))
        self.names = Names(self.nodes)
        self.findings: list[Finding] = []
        self.new_imports: list[tuple[str, str]] = []
        self.handled: set[cst.CSTNode] = set()
        self.functions = {
            node.name.value
            for node in self.nodes
            if isinstance(node, (cst.FunctionDef, cst.ClassDef))
        }
        self.guarded = {
            inner
            for node in self.nodes
            if isinstance(node, cst.Try) and any(map(_is_of_names, node.handlers))
            for inner in walk(node.body)
        }
        self.in_imports = {
            inner
            for node in self.nodes
            if isinstance(node, (cst.Import, cst.ImportFrom))
            for inner in walk(node)
        }
        # Of a name with dots, all but the longest.
        self.shorter = {
            node.value for node in self.nodes if isinstance(node, cst.Attribute)
        }
        self.called = {node.func for node in self.nodes if isinstance(node, cst.Call)}
        self._reads: dict[str, list[cst.CSTNode]] = {}
        self._positions = positions
        # An import gives a name no value that a rule could follow.
        nodes = [node for node in self.nodes if node not in self.in_imports]
        self._bound = _Bound(self.names, nodes)
        self._scopes = Scopes(module, self._bound.bindings)

    def left(self, node: cst.CSTNode, reason: str, advice: str) -> None:
        """Note that a line cannot be changed, and what to write instead."""
        self.findings.append(Finding(self.line(node), reason, advice))

    def note(self, node: cst.CSTNode, reason: str, advice: str) -> None:
        """Note what a person should know of a line, which needs no change for it."""
        self.findings.append(Finding(self.line(node), reason, advice, is_left=False))

    def line(self, node: cst.CSTNode) -> int:
        """The number of its first line, from 1; of the file's where it has none."""
        found = self._positions.get(node)
        return found.start.line if found is not None else 1  # type: ignore[attr-defined]

    def is_shadowed(self, node: cst.CSTNode) -> bool:
        """Whether the file assigns the name of a module itself, such as a parameter."""
        first = (dotted(node) or "").partition(".")[0]
        return any(
            value is None or self.names.of(value) is None
            for value in self.values(first)
        )

    def is_optimizer(self, node: cst.BaseExpression) -> bool:
        """Whether an expression is an optimizer: by its name, or by what made it."""
        name = dotted(node)
        if isinstance(node, cst.Subscript):
            return self._bound.made.get(dotted(node.value) or "") == {"optimizers"}
        if name is None:
            return isinstance(node, cst.Attribute) and node.attr.value == "optimizer"
        if name.rpartition(".")[2] in ("optimizer", "_optimizer"):
            return True
        return self._bound.made.get(name) == {"optimizer"}

    def is_model(self, node: cst.BaseExpression) -> bool:
        """Whether an expression is a model: by its name, or by what made it."""
        name = dotted(node) or ""
        if name.rpartition(".")[2] in ("model", "_model"):
            return True
        return self._bound.made.get(name) == {"model"}

    def optimizer_class(self, call: cst.Call) -> str | None:
        """`"SGD"` for `keras.optimizers.SGD(…)`, legacy or not; else `None`."""
        module, _, name = (self.names.of(call.func) or "").rpartition(".")
        known = ("keras.optimizers", "keras.optimizers.legacy")
        return name if module in known and name in OPTIMIZERS else None

    def is_optimizer_class(self, node: cst.BaseExpression) -> bool:
        """Whether an expression gives one of several classes of optimizers.

        As `getattr(keras.optimizers, name)`, `{"sgd": SGD, "adam": Adam}[name]`.
        """
        name = dotted(node)
        if name is not None and self.names.of(node) is None:
            values = self.values_at(name, node)
            return bool(values) and all(
                value is not None and self._mentions_optimizers(value)
                for value in values
            )
        if isinstance(node, cst.Subscript):
            base = dotted(node.value)
            values = self.values_at(base, node.value) if base else [node.value]
            return bool(values) and all(
                isinstance(value, cst.Dict) and self._mentions_optimizers(value)
                for value in values
            )
        return isinstance(node, cst.Call) and self._mentions_optimizers(node)

    def _mentions_optimizers(self, node: cst.CSTNode) -> bool:
        """Whether there is a class of `keras.optimizers` in it, and none is called."""
        names = [self.names.of(one) or "" for one in walk(node)]
        calls = [one for one in walk(node) if isinstance(one, cst.Call)]
        is_made = any(self.optimizer_class(one) is not None for one in calls)
        is_there = any(f"{name}.".startswith("keras.optimizers.") for name in names)
        return is_there and not is_made and not any("schedules" in n for n in names)

    def is_known_before(self, value: cst.BaseExpression, node: cst.CSTNode) -> bool:
        """Whether a value can be computed at a node: of numbers and names set once."""
        before = {id(one) for one in self.nodes[: self.nodes.index(node)]}
        for one in walk(value):
            if isinstance(one, cst.Call) and self.names.of(one.func) == "hvd.size":
                continue
            if isinstance(one, cst.Name):
                is_module = one.value in self.names.local
                set_here = self.values(one.value)
                is_set = len(set_here) == 1 and id(set_here[0]) in before
                if not (is_module or is_set or one.value == "size"):
                    return False
            elif not isinstance(
                one, (cst.Integer, cst.BinaryOperation, cst.BaseBinaryOp, cst.Attribute)
            ):
                return False
        return True

    def values(self, name: str) -> list[cst.BaseExpression | None]:
        """All that the file assigns to a name; `None` for what is not one value."""
        return self._bound.values.get(name, [])

    def assigned(self) -> list[str]:
        """All names to which the file assigns something."""
        return list(self._bound.values)

    def reads(self, name: str) -> list[cst.CSTNode]:
        """All nodes that read a name, which may have dots."""
        if not self._reads:
            for node in self.nodes:
                read = dotted(node) if node not in self._not_read else None
                if read is not None:
                    self._reads.setdefault(read, []).append(node)
        return self._reads.get(name, [])

    def is_read(self, node: cst.CSTNode) -> bool:
        """Whether a node is a name that is read: not assigned, and no keyword."""
        return isinstance(node, (cst.Name, cst.Attribute)) and (
            node not in self._not_read
        )

    @functools.cached_property
    def _not_read(self) -> set[cst.CSTNode]:
        """Names that are assigned, defined, imported, or words of other nodes."""
        found = set(self.in_imports)
        for node in self.nodes:
            if isinstance(node, cst.Attribute):
                found.add(node.attr)
            elif isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.Param)):
                found.add(node.name)
            elif isinstance(node, cst.Arg) and node.keyword is not None:
                found.add(node.keyword)
            elif isinstance(node, cst.NameItem):
                found.add(node.name)
            elif isinstance(node, (cst.AssignTarget, cst.AnnAssign, cst.For)):
                found |= _targets(node.target)
        return found

    def is_in_loop(self, node: cst.CSTNode) -> bool:
        """Whether a node is in a loop of the function in which it is."""
        return self._scopes.is_in_loop(node)

    def function_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """The innermost function around a node, or the file."""
        return self._scopes.function_of(node)

    def values_at(
        self, name: str, node: cst.CSTNode
    ) -> list[cst.BaseExpression | None]:
        """What a name may have been assigned where a node of the file reads it."""
        if "." in name:
            return self.values(name)  # an attribute, of all functions
        return self._scopes.values_at(name, node)


class _Bound:
    """What is assigned to each name, and what kind of object that makes it."""

    def __init__(self, names: Names, nodes: Sequence[cst.CSTNode]):
        self.made: dict[str, set[str]] = {}
        self.values: dict[str, list[cst.BaseExpression | None]] = {}
        self.bindings: list[Binding] = []
        self._names = names
        for node in nodes:
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    self._bind(target.target, node.value)
            elif isinstance(node, cst.AnnAssign) and node.value is not None:
                self._bind(node.target, node.value)
            elif isinstance(node, (cst.AugAssign, cst.For, cst.CompFor)):
                self._bind(node.target, None)  # what the file does not say
            elif isinstance(node, (cst.Param, cst.AsName)):
                self._bind(node.name, None)

    def _bind(self, target: cst.CSTNode, value: cst.BaseExpression | None) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            is_pair = isinstance(value, (cst.Tuple, cst.List))
            values = [one.value for one in value.elements] if is_pair else []  # type: ignore[union-attr]
            if len(values) != len(target.elements):
                values = [None] * len(target.elements)
            for element, own in zip(target.elements, values, strict=True):
                self._bind(element.value, own)
        name = dotted(target)
        if name is not None:
            self.values.setdefault(name, []).append(value)
            self.bindings.append(Binding(name, target, value))
            self.made.setdefault(name, set()).add(self._kind(value))

    def _kind(self, value: cst.BaseExpression | None) -> str:
        if isinstance(value, (cst.Dict, cst.List, cst.Tuple)):
            kinds = {self._kind(getattr(one, "value", None)) for one in value.elements}
            return "optimizers" if kinds == {"optimizer"} else "other"
        if not isinstance(value, cst.Call):
            return "other"
        name = self._names.of(value.func) or ""
        if name.startswith("keras.optimizers.") and "schedules" not in name:
            return "optimizer"
        if name in ("hvd.DistributedOptimizer", "hvd.PartialDistributedOptimizer"):
            return "optimizer"
        is_model = name.rpartition(".")[2] in ("Sequential", "Model", "load_model")
        if is_model or name.startswith("keras.applications."):
            return "model"
        return "other"


def _targets(node: cst.CSTNode) -> set[cst.CSTNode]:
    """The names that an assignment to a node assigns."""
    if isinstance(node, (cst.Tuple, cst.List)):
        return {name for one in node.elements for name in _targets(one.value)}
    return {node}


def _is_of_names(handler: cst.ExceptHandler) -> bool:
    """Whether an `except` is for a name that is not there."""
    known = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"}
    names = [dotted(one) for one in walk(handler.type)] if handler.type else [*known]
    return not known.isdisjoint(names)
