"""With `--to dist_fit`: one call instead of Horovod's optimizer and callbacks."""

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m

from keras_dist.tools.migrate import source as keras_3
from keras_dist.tools.migrate.arguments import (
    appended,
    literal,
    passed,
    without_elements,
)
from keras_dist.tools.migrate.command import Migrated
from keras_dist.tools.migrate.plan import ADDS, AVERAGE, BROADCAST, OPTIMIZER, Plan
from keras_dist.tools.migrate.script import Script, count_uses, dotted


def migrate(source: bytes) -> Migrated:
    """Rewrite a script for Horovod's Keras layer to one call of `dist_fit`, or refuse.

    Args:
        source: The text of a Python file.

    Returns:
        The new text; or the old one, with each line of which one cannot be sure.
    """
    first = keras_3.migrate(source)
    if not first.is_whole:
        return Migrated(source, first.findings)
    module = cst.parse_module(first.source)
    script = Script(module)
    if not script.names.uses("hvd") or not script.names.uses_keras():
        return first
    plan = Plan(script)
    changed = module.visit(_Rewrite(script, plan))
    new = {*plan.finish_refusals(), *script.findings}
    lines = _lines_before(source, first.source)
    moved = {dataclasses.replace(one, line=lines(one.line)) for one in new}
    findings = tuple(sorted({*first.findings, *moved}))
    is_sure = not any(finding.is_left for finding in findings)
    return Migrated(changed.bytes if is_sure else source, findings)


def _lines_before(old: bytes, new: bytes) -> Callable[[int], int]:
    """Return a function from a line on Keras 3 to the line from which it came."""
    before, after = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    lines: dict[int, int] = {}
    for _, start, end, first, last in matcher.get_opcodes():
        for index in range(first, last):
            lines[index + 1] = min(start + index - first, max(start, end - 1)) + 1
    return lambda line: lines.get(line, line)


# What stands for a line that is removed, until its block is left.
_MARK = cst.Comment("# keras-dist: removed")


def _added(line: cst.CSTNode) -> Sequence[cst.Arg]:
    """Return what a line such as `callbacks.append(…)` adds to a list, if it does."""
    if not m.matches(line, m.SimpleStatementLine([m.Expr(ADDS)])):
        return ()
    statement = cst.ensure_type(line, cst.SimpleStatementLine).body[0]
    call = cst.ensure_type(statement, cst.Expr).value
    return cst.ensure_type(call, cst.Call).args


def _removed(line: cst.SimpleStatementLine | cst.If) -> cst.SimpleStatementLine:
    """Return a mark for a line, which keeps the blank line above it."""
    blank = [one for one in line.leading_lines[:1] if one.comment is None]
    end = cst.TrailingWhitespace(comment=_MARK)
    return cst.SimpleStatementLine([cst.Pass()], blank, trailing_whitespace=end)


def _without_marks(lines: Sequence[Any]) -> list[Any]:
    """Remove marked lines of a block; a blank line above them stays."""
    found: list[Any] = []
    blank: list[cst.EmptyLine] = []
    for line in lines:
        end = getattr(line, "trailing_whitespace", None)
        if (
            end is not None
            and end.comment is not None
            and end.comment.value == _MARK.value
        ):
            blank = blank or list(line.leading_lines)
            continue
        has_blank = any(one.comment is None for one in line.leading_lines[:1])
        if blank and not has_blank:
            line = line.with_changes(leading_lines=[*blank, *line.leading_lines])
        blank = []
        found.append(line)
    return found or [cst.SimpleStatementLine([cst.Pass()])]


class _Rewrite(cst.CSTTransformer):
    """Remove what `dist_fit` does by itself, and call it.

    Args:
        script: The file.
        plan: What was found in it.
    """

    def __init__(self, script: Script, plan: Plan):
        super().__init__()
        self._script = script
        self._plan = plan
        ifs = [node for node in script.nodes if isinstance(node, cst.If)]
        self._pinning = [node for node in ifs if self._pins(node)]

    def leave_Module(
        self, original_node: cst.Module, updated_node: cst.Module
    ) -> cst.Module:
        """Remove lines of the file."""
        return updated_node.with_changes(body=_without_marks(updated_node.body))

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Remove lines of a block."""
        return updated_node.with_changes(body=_without_marks(updated_node.body))

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        """`import horovod.keras as hvd`."""
        names = {dotted(alias.name) or "" for alias in original_node.names}
        if not any(name.startswith(("horovod.", "keras_dist.")) for name in names):
            return updated_node
        if len(names) > 1:
            advice = "Import Horovod on a line of its own"
            self._script.left(original_node, "this imports something else, too", advice)
        return cst.Import(names=[cst.ImportAlias(name=cst.Name("keras_dist"))])

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> Any:
        """`from horovod.tensorflow import keras as hvd`."""
        module = dotted(original_node.module) or ""
        if module.partition(".")[0] not in ("horovod", "keras_dist"):
            return updated_node
        if module not in ("horovod.tensorflow", "horovod", "keras_dist"):
            advice = "Import the module, as hvd, and use its names by it"
            self._script.left(original_node, f"single names of {module}", advice)
        return cst.Import(names=[cst.ImportAlias(name=cst.Name("keras_dist"))])

    def leave_SimpleStatementLine(
        self,
        original_node: cst.SimpleStatementLine,
        updated_node: cst.SimpleStatementLine,
    ) -> Any:
        """`hvd.init()`, `opt = hvd.DistributedOptimizer(opt)`, a callback appended."""
        old, new = original_node.body[0], updated_node.body[0]
        if isinstance(old, cst.Assign) and isinstance(new, cst.Assign):
            target = dotted(old.targets[0].target)
            code = cst.Module([]).code_for_node
            is_plain = code(new.targets[0].target) == code(new.value)
            if is_plain and code(old.value) != code(new.value):
                return _removed(original_node)
            if target is not None and self._is_for_pinning(target, old.value):
                return _removed(original_node)
        if not isinstance(old, cst.Expr) or not isinstance(old.value, cst.Call):
            return updated_node
        if self._script.is_call(old.value, "hvd.init"):
            self._plan.finish(old)
            return _removed(original_node)
        is_added = m.matches(old.value, ADDS) and len(old.value.args) == 1
        if is_added and self._is_removed(old.value.args[0].value):
            return _removed(original_node)
        return updated_node

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> cst.List:
        """Remove Horovod's callbacks from a list."""
        gone = [self._is_removed(old.value) for old in original_node.elements]
        return without_elements(updated_node, gone) if any(gone) else updated_node

    def leave_BinaryOperation(
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        """`0.001 * hvd.size()` of a rate."""
        plan, script, operator = self._plan, self._script, original_node.operator
        right = script.is_call(original_node.right, "hvd.size")
        left = script.is_call(original_node.left, "hvd.size")
        is_rate = isinstance(operator, cst.Multiply) and original_node in plan.rates
        if right and is_rate:
            plan.finish(original_node.right)
            return updated_node.left
        if left and is_rate:
            plan.finish(original_node.left)
            return updated_node.right
        return updated_node

    def leave_IfExp(
        self, original_node: cst.IfExp, updated_node: cst.IfExp
    ) -> cst.BaseExpression:
        """`verbose=1 if hvd.rank() == 0 else 0`."""
        is_verbose = original_node in self._plan.verbose
        is_silent = literal(original_node.orelse) == 0
        if is_verbose and is_silent and self._is_first(original_node.test):
            self._plan.finish(original_node.test)
            return updated_node.body
        return updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """`if hvd.rank() == 0: callbacks.append(…)`, and the GPU of this rank."""
        if original_node in self._pinning:
            self._plan.finish(original_node)
            return _removed(original_node)
        if not self._is_first(original_node.test):
            return updated_node
        self._plan.finish(original_node.test)
        added = [_added(line) for line in original_node.body.body]
        is_other = original_node.orelse is not None and any(added)
        if is_other or any(one and not self._plan.writes(one) for one in added):
            reason = (
                "only the first rank has this callback, and dist_fit runs it on all"
            )
            self._plan.refuse(original_node, reason)
        if original_node.orelse is None and all(
            self._plan.writes(one) for one in added
        ):
            lines: list[Any] = list(updated_node.body.body)
            leading = [*updated_node.leading_lines, *lines[0].leading_lines]
            lines[0] = lines[0].with_changes(leading_lines=leading)
            return cst.FlattenSentinel(lines)
        test = cst.parse_expression("keras_dist.rank() == 0")
        return updated_node.with_changes(test=test)

    def leave_Subscript(
        self, original_node: cst.Subscript, updated_node: cst.Subscript
    ) -> cst.BaseExpression:
        """`x[hvd.rank() :: hvd.size()]`."""
        is_shard = original_node in self._plan.data.shards
        return updated_node.value if is_shard else updated_node

    def leave_Call(
        self, original_node: cst.Call, updated_node: cst.Call
    ) -> cst.BaseExpression:
        """`dataset.shard(…)`, `hvd.DistributedOptimizer(…)`, `model.fit(…)`."""
        func = original_node.func
        if original_node in self._plan.data.shards:
            return cst.ensure_type(updated_node.func, cst.Attribute).value
        is_size = self._script.is_call(original_node, "hvd.size")
        if is_size and original_node in self._plan.steps:
            self._plan.finish(original_node)
            return cst.parse_expression("keras_dist.size()")
        is_optimizer = self._script.names.of(func) == OPTIMIZER
        if is_optimizer and func in self._plan.done:
            return passed(updated_node, "optimizer", 0) or updated_node
        if original_node in self._plan.fits:
            return self._dist_fit(updated_node)
        return updated_node

    def _dist_fit(self, call: cst.Call) -> cst.Call:
        comma = cst.Comma(whitespace_after=call.whitespace_before_args)
        if isinstance(call.whitespace_before_args, cst.SimpleWhitespace):
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        model = cst.Arg(value=cst.ensure_type(call.func, cst.Attribute).value)
        if call.args:
            model = model.with_changes(comma=comma)
        func = cst.Attribute(value=cst.Name("keras_dist"), attr=cst.Name("dist_fit"))
        call = call.with_changes(func=func, args=[model, *call.args])
        for name, code in self._plan.options.items():
            call = appended(call, name, cst.parse_expression(code))
        return call

    def _is_first(self, test: cst.BaseExpression) -> bool:
        """Tell whether a test is `hvd.rank() == 0`."""
        equal = m.Comparison(comparisons=[m.ComparisonTarget(operator=m.Equal())])
        if not m.matches(test, equal):
            return False
        comparison = cst.ensure_type(test, cst.Comparison)
        is_zero = literal(comparison.comparisons[0].comparator) == 0
        return is_zero and self._script.is_call(comparison.left, "hvd.rank")

    def _is_removed(self, node: cst.BaseExpression) -> bool:
        """Tell whether `dist_fit` does what a callback does."""
        if not isinstance(node, cst.Call):
            return False
        name = self._script.names.of(node.func)
        root = passed(node, "root_rank", 0)
        found = name == BROADCAST and len(node.args) == 1 and literal(root) == 0
        found |= name == AVERAGE and not node.args
        if found:
            self._plan.finish(node)
        return found

    def _is_for_pinning(self, target: str, value: cst.BaseExpression) -> bool:
        """Tell whether a line lists GPUs of which one is chosen, and nothing else."""
        if not isinstance(value, cst.Call):
            return False
        name = self._script.names.of(value.func) or ""
        uses = sum(count_uses(node, {target}) for node in self._pinning)
        is_list = name.endswith(".list_physical_devices") and uses > 0
        return is_list and count_uses(self._script.module, {target}) == uses + 1

    def _pins(self, node: cst.If) -> bool:
        """Tell whether this gives a rank its GPU, as the import of keras_dist does."""
        if node.orelse is not None or len(node.body.body) != 1:
            return False
        calls = m.findall(node.body, m.Call(func=m.Attribute()))
        names = [
            self._script.names.of(cst.ensure_type(one, cst.Call).func) for one in calls
        ]
        return sorted(str(name).rpartition(".")[2] for name in names) == [
            *("local_rank", "set_visible_devices")
        ]
