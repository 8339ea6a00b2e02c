"""Which of several assignments of a name a line reads."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import libcst as cst

from keras_dist.tools.migrate.names import inside, walk

_BLOCKS = (cst.Module, cst.IndentedBlock, cst.SimpleStatementSuite)

Values: TypeAlias = list[cst.BaseExpression | None]


class Binding(NamedTuple):
    """An assignment of a name.

    Args:
        name: The name.
        target: The node that is assigned to.
        value: What it is assigned; `None` for what is not one value.
    """

    name: str
    target: cst.CSTNode
    value: cst.BaseExpression | None


class Position(NamedTuple):
    """Where a node is.

    Args:
        number: Of the node, in the order of the text.
        functions: The functions around it, from the outside; the first is the file.
        blocks: The blocks of lines around it, from the outside.
        loops: The loops around it.
    """

    number: int
    functions: tuple[cst.CSTNode, ...] = ()
    blocks: tuple[cst.CSTNode, ...] = ()
    loops: tuple[cst.CSTNode, ...] = ()


class Scopes:
    """The functions of a file, and the names that are assigned in each.

    Args:
        module: The file.
        bindings: All assignments of names in it, in the order of the text.
    """

    def __init__(self, module: cst.Module, bindings: Iterable[Binding]):
        self._positions = dict(_positions(module))
        self._bindings: dict[tuple[str, cst.CSTNode], list[Binding]] = {}
        shared = {
            item.name.value
            for node in self._positions
            if isinstance(node, (cst.Global, cst.Nonlocal))
            for item in node.names
        }
        for binding in bindings:
            functions = self._positions[binding.target].functions
            scope = module if binding.name in shared else functions[-1]
            self._bindings.setdefault((binding.name, scope), []).append(binding)

    def is_in_loop(self, node: cst.CSTNode) -> bool:
        """Whether a node is in a loop of the function in which it is."""
        return bool(self._positions[node].loops)

    def function_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """The innermost function around a node, or the file."""
        return self._positions[node].functions[-1]

    def values_at(self, name: str, node: cst.CSTNode) -> Values:
        """The values that a name may have at a node, in the order of the text."""
        here = self._positions[node]
        for scope in reversed(here.functions):
            found = self._bindings.get((name, scope))
            if found is not None and scope is here.functions[-1]:
                found = self._reaching(found, here)
            if found is not None:
                return [binding.value for binding in found]
        return []

    def _reaching(self, found: list[Binding], here: Position) -> list[Binding]:
        """Of assignments in the same function, those that are not out of date."""
        last: list[Binding] = []
        for binding in found:
            there = self._positions[binding.target]
            is_before = self._end(binding) < here.number
            if is_before and there.blocks[-1] in here.blocks:
                last = []  # it is executed in any case, and after those before
            if is_before or set(there.loops) & set(here.loops):
                last.append(binding)
        return last or found

    def _end(self, binding: Binding) -> int:
        """Number of the last node of an assignment: its value is computed first."""
        *_, last = walk(binding.value or binding.target)
        return self._positions[last].number


def _positions(module: cst.Module) -> Iterator[tuple[cst.CSTNode, Position]]:
    """Each node with its position, in the order of the text."""
    number = 0
    stack: list[tuple[cst.CSTNode, Position]] = [(module, Position(0))]
    while stack:
        node, (_, functions, blocks, loops) = stack.pop()
        if isinstance(node, (cst.Module, cst.FunctionDef)):
            functions, loops = (*functions, node), ()
        if isinstance(node, _BLOCKS):
            blocks = (*blocks, node)
        elif isinstance(node, (cst.For, cst.While)):
            loops = (*loops, node)
        number += 1
        position = Position(number, functions, blocks, loops)
        yield node, position
        stack += reversed([(child, position) for child in inside(node)])
