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
from keras_dist.tools.migrate.script import Script, count_uses, dotted, owner_of


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


def _added(line: Any) -> Sequence[cst.Arg]:
    """Return what a line such as `callbacks.append(…)` adds to a list, if it does."""
    if not m.matches(line, m.SimpleStatementLine([m.Expr(ADDS)])):
        return ()
    return line.body[0].value.args


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
        self._gone: set[cst.CSTNode] = set()
        ifs = [node for node in script.nodes if isinstance(node, cst.If)]
        self._pinning = [node for node in ifs if self._pins(node)]

    def _remove(self, line: Any) -> Any:
        """Mark a line as removed, until its block is left."""
        self._gone.add(line)
        return line

    def leave_Module(self, original_node: Any, updated_node: Any) -> Any:
        """Leave out removed lines, but not a blank line above them."""
        found: list[Any] = []
        blank: list[cst.EmptyLine] = []
        for line in updated_node.body:
            above = [one for one in line.leading_lines[:1] if one.comment is None]
            if line in self._gone:
                blank = blank or above
                continue
            if blank and not above:
                line = line.with_changes(leading_lines=[*blank, *line.leading_lines])
            blank = []
            found.append(line)
        return updated_node.with_changes(
            body=found or [cst.SimpleStatementLine([cst.Pass()])]
        )

    leave_IndentedBlock = leave_Module

    def leave_Import(self, original_node: Any, updated_node: Any) -> Any:
        """`import horovod.keras as hvd`."""
        names = {dotted(alias.name) or "" for alias in original_node.names}
        if not any(name.startswith(("horovod.", "keras_dist.")) for name in names):
            return updated_node
        if len(names) > 1:
            advice = "Import Horovod on a line of its own"
            self._script.leave(
                original_node, "this imports something else, too", advice
            )
        return cst.Import(names=[cst.ImportAlias(name=cst.Name("keras_dist"))])

    def leave_ImportFrom(self, original_node: Any, updated_node: Any) -> Any:
        """`from horovod.tensorflow import keras as hvd`."""
        module = dotted(original_node.module) or ""
        if module.partition(".")[0] not in ("horovod", "keras_dist"):
            return updated_node
        if module not in ("horovod.tensorflow", "horovod", "keras_dist"):
            advice = "Import the module, as hvd, and use its names by it"
            self._script.leave(original_node, f"single names of {module}", advice)
        return cst.Import(names=[cst.ImportAlias(name=cst.Name("keras_dist"))])

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:
        """`hvd.init()`, `opt = hvd.DistributedOptimizer(opt)`, a callback appended."""
        old, new = original_node.body[0], updated_node.body[0]
        if isinstance(old, cst.Assign) and isinstance(new, cst.Assign):
            target = dotted(old.targets[0].target)
            code = cst.Module([]).code_for_node
            is_plain = code(new.targets[0].target) == code(new.value)
            if is_plain and code(old.value) != code(new.value):
                return self._remove(updated_node)
            if target is not None and self._is_for_pinning(target, old.value):
                return self._remove(updated_node)
        if not isinstance(old, cst.Expr) or not isinstance(old.value, cst.Call):
            return updated_node
        if self._script.is_call(old.value, "hvd.init"):
            self._plan.finish(old)
            return self._remove(updated_node)
        is_added = m.matches(old.value, ADDS) and len(old.value.args) == 1
        if is_added and self._is_removed(old.value.args[0].value):
            return self._remove(updated_node)
        return updated_node

    def leave_List(self, original_node: Any, updated_node: Any) -> Any:
        """Remove Horovod's callbacks from a list."""
        gone = [self._is_removed(old.value) for old in original_node.elements]
        return without_elements(updated_node, gone) if any(gone) else updated_node

    def leave_BinaryOperation(self, original_node: Any, updated_node: Any) -> Any:
        """`0.001 * hvd.size()` of a rate."""
        is_product = isinstance(original_node.operator, cst.Multiply)
        if is_product and original_node in self._plan.rates:
            for side, other in (("right", "left"), ("left", "right")):
                factor = getattr(original_node, side)
                if self._script.is_call(factor, "hvd.size"):
                    self._plan.finish(factor)
                    return getattr(updated_node, other)
        return updated_node

    def leave_IfExp(self, original_node: Any, updated_node: Any) -> Any:
        """`verbose=1 if hvd.rank() == 0 else 0`."""
        is_verbose = original_node in self._plan.verbose
        is_silent = literal(original_node.orelse) == 0
        if is_verbose and is_silent and self._is_first(original_node.test):
            self._plan.finish(original_node.test)
            return updated_node.body
        return updated_node

    def leave_If(self, original_node: Any, updated_node: Any) -> Any:
        """`if hvd.rank() == 0: callbacks.append(…)`, and the GPU of this rank."""
        if original_node in self._pinning:
            self._plan.finish(original_node)
            return self._remove(updated_node)
        if not self._is_first(original_node.test):
            return updated_node
        self._plan.finish(original_node.test)
        added = [_added(line) for line in original_node.body.body]
        is_other = original_node.orelse is not None and any(added)
        if is_other or any(one and not self._plan.writes(one) for one in added):
            reason = "only the first rank has this callback, and dist_fit runs it on "
            self._plan.refuse(original_node, f"{reason}all")
        is_plain = original_node.orelse is None
        if is_plain and all(self._plan.writes(one) for one in added):
            lines: list[Any] = list(updated_node.body.body)
            leading = [*updated_node.leading_lines, *lines[0].leading_lines]
            lines[0] = lines[0].with_changes(leading_lines=leading)
            return cst.FlattenSentinel(lines)
        test = cst.parse_expression("keras_dist.rank() == 0")
        return updated_node.with_changes(test=test)

    def leave_Subscript(self, original_node: Any, updated_node: Any) -> Any:
        """`x[hvd.rank() :: hvd.size()]`."""
        is_shard = original_node in self._plan.data.shards
        return updated_node.value if is_shard else updated_node

    def leave_Call(self, original_node: Any, updated_node: Any) -> Any:
        """`dataset.shard(…)`, `hvd.DistributedOptimizer(…)`, `model.fit(…)`."""
        func = original_node.func
        if original_node in self._plan.data.shards:
            return owner_of(updated_node)
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
        model = cst.Arg(value=owner_of(call))
        if call.args:
            model = model.with_changes(comma=comma)
        func = cst.Attribute(value=cst.Name("keras_dist"), attr=cst.Name("dist_fit"))
        call = call.with_changes(func=func, args=[model, *call.args])
        for name, code in self._plan.options.items():
            call = appended(call, name, cst.parse_expression(code))
        return call

    def _is_first(self, test: cst.BaseExpression) -> bool:
        """Tell whether a test is `hvd.rank() == 0`."""
        zero = m.ComparisonTarget(operator=m.Equal(), comparator=m.Integer("0"))
        call = m.SaveMatchedNode(m.Call(), "call")
        found = m.extract(test, m.Comparison(left=call, comparisons=[zero]))
        return found is not None and self._script.is_call(found["call"], "hvd.rank")  # type: ignore[arg-type]

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
        calls: Any = m.findall(node.body, m.Call(func=m.Attribute()))
        names = [str(self._script.names.of(call.func)) for call in calls]
        last = sorted(name.rpartition(".")[2] for name in names)
        return last == ["local_rank", "set_visible_devices"]
