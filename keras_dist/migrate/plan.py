"""What a script says about its training, and which lines `dist_fit` can replace."""

from collections.abc import Sequence

import libcst as cst
from libcst import matchers as m

from keras_dist.migrate.arguments import keyword, literal, passed
from keras_dist.migrate.names import dotted, walk
from keras_dist.migrate.report import Finding
from keras_dist.migrate.script import Script

_BY_HAND = "Change it by hand, or migrate without --to"

# What `dist_fit` does otherwise than a name of Horovod's, where a script is refused.
_INSTEAD = {
    "hvd.allreduce": "the metrics of dist_fit are those of all ranks",
    "hvd.load_model": "keras.saving.load_model is enough",
    "hvd.elastic": "dist_fit resumes from checkpoints",
    "hvd.callbacks.LearningRateScheduleCallback": "keras.callbacks."
    "LearningRateScheduler would take the rates of one process",
    "hvd.DistributedOptimizer": "dist_fit takes only op= and compression= of it",
    "hvd.callbacks.LearningRateWarmupCallback": "dist_fit warms up to the optimizer's "
    "rate, scaled by the ranks, and counts the steps itself",
    "hvd.size": "dist_fit scales rate and steps itself, so this may be one too many",
}
_UNKNOWN = "it is none of the idioms that dist_fit replaces"

BROADCAST = "hvd.callbacks.BroadcastGlobalVariablesCallback"
AVERAGE = "hvd.callbacks.MetricAverageCallback"
WARMUP = "hvd.callbacks.LearningRateWarmupCallback"
OPTIMIZER = "hvd.DistributedOptimizer"
_STEPS = {
    "steps_per_epoch": "steps_scaling",
    "validation_steps": "validation_steps_scaling",
}
_WRITING = {
    f"keras.callbacks.{name}"
    for name in ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "TensorBoard")
}
# Values of arguments of the optimizer, as options of `dist_fit`.
_OPTIONS = {
    "hvd.Compression.fp16": ("compression", '"fp16"'),
    "hvd.Compression.none": None,
    "hvd.Sum": ("op", '"sum"'),
    "hvd.Average": None,
}


class Plan:
    """Where rates and steps of a script are, and what `dist_fit` has to be passed.

    Args:
        script: The file.
    """

    def __init__(self, script: Script):
        self.options: dict[str, str] = {}
        self.fits: list[cst.Call] = []
        self.rates: set[cst.CSTNode] = set()
        self.steps: set[cst.CSTNode] = set()
        self.verbose: set[cst.CSTNode] = set()
        self.done: set[cst.CSTNode] = set()
        self._script = script
        self._divides = False
        self._uses: list[cst.Attribute] = []

        self._rates_of_optimizers: set[str] = set()

        self._look_at_uses()
        for node in script.nodes:
            if isinstance(node, cst.Call):
                self._look(node)
        self._is_rate_scaled = any(self._is_scaled(node) for node in self.rates)
        if not self._is_rate_scaled:
            self.options["lr_scaling"] = '"none"'
        if not any(self.is_shard(node) for node in script.nodes) and not self._divides:
            self.options["shard"] = '"none"'  # each rank reads all of it, as before

    def _look_at_uses(self) -> None:
        """Each use of Horovod, by its longest name."""
        shorter: set[cst.CSTNode] = set()
        for node in self._script.nodes:
            if not isinstance(node, cst.Attribute) or node in shorter:
                continue
            if (self._script.names.of(node) or "").startswith("hvd."):
                self._uses.append(node)
                shorter |= set(walk(node))

    def _look(self, node: cst.Call) -> None:
        """Where rates and steps are passed, and options."""
        name = self._script.names.of(node.func)
        if self._script.optimizer_class(node) is not None:
            rate = passed(node, "learning_rate", 0) or passed(node, "lr", 0)
            self._rates_of_optimizers.add(self._text(self._add(rate, self.rates)))
        elif name == WARMUP:
            self._add(passed(node, "initial_lr", 0), self.rates)
            epochs = passed(node, "warmup_epochs", 1)
            code = self._script.module.code_for_node(epochs) if epochs else "5"
            self.options["warmup_epochs"] = code
        elif name == OPTIMIZER:
            self._look_at_optimizer(node)
        is_fit = m.matches(node.func, m.Attribute(attr=m.Name("fit")))
        if is_fit and self._script.is_model(node.func.value):  # type: ignore[attr-defined]
            self._look_at_fit(node)

    def can_warm_up(self, node: cst.Call) -> bool:
        """Whether `dist_fit` warms up as this callback does: to the optimizer's rate.

        The optimizer's is the rate of all ranks, so there is something to warm up to.
        """
        rate = passed(node, "initial_lr", 0)
        is_known = passed(node, "steps_per_epoch", 3) is None and rate is not None
        text = self._text(self._add(rate, set()))
        return is_known and self._is_rate_scaled and {text} == self._rates_of_optimizers

    def writes(self, args: Sequence[cst.Arg]) -> bool:
        """Whether callbacks that are added to a list are those of Keras that write.

        `dist_fit` runs them on the first rank by itself, and others on all ranks.
        """
        found: list[cst.BaseExpression] = []
        for arg in args:
            is_several = isinstance(arg.value, (cst.List, cst.Tuple))
            inner = arg.value.elements if is_several else [arg]  # type: ignore[attr-defined]
            found += [(self._add(one.value, set()) or [one.value])[-1] for one in inner]
        names = [
            self._script.names.of(one.func) if isinstance(one, cst.Call) else None
            for one in found
        ]
        return bool(names) and all(name in _WRITING for name in names)

    def _text(self, values: list[cst.BaseExpression]) -> str:
        """The text of a value; or of what its name is assigned, where that is once."""
        node = values[1] if len(values) == 2 else values[0] if values else None
        return "" if node is None else self._script.module.code_for_node(node)

    def is_call(self, node: cst.CSTNode | None, name: str) -> bool:
        """Whether a node is `hvd.size()`, for example."""
        if not isinstance(node, cst.Call) or node.args:
            return False
        return self._script.names.of(node.func) == name

    def is_shard(self, node: cst.CSTNode) -> bool:
        """Whether this is the part of some data that a rank reads."""
        if isinstance(node, cst.Call):
            values: list[cst.CSTNode | None] = [arg.value for arg in node.args]
            is_method = m.matches(node.func, m.Attribute(attr=m.Name("shard")))
        elif isinstance(node, cst.Subscript) and len(node.slice) == 1:
            index = node.slice[0].slice
            is_method = isinstance(index, cst.Slice) and index.upper is None
            values = [index.step, index.lower] if isinstance(index, cst.Slice) else []
        else:
            return False
        names = ["hvd.size", "hvd.rank"]
        return is_method and len(values) == 2 and all(map(self.is_call, values, names))

    def finish(self, node: cst.CSTNode) -> None:
        """Note that all uses of Horovod in a node are replaced."""
        self.done |= set(m.findall(node, m.Attribute()))

    def refusals(self) -> list[Finding]:
        """Why one cannot be sure of this script; empty if one can."""
        found = []
        for node in self._uses:
            if node not in self.done:
                name = self._script.names.of(node) or ""
                known = [text for key, text in _INSTEAD.items() if name.startswith(key)]
                reason = f"{name} is used here, and {[*known, _UNKNOWN][0]}"
                found.append(Finding(self._script.line(node), reason, _BY_HAND))
        if len(self.fits) != 1:
            reason = f"dist_fit replaces one model.fit, and there are {len(self.fits)}"
            found.append(Finding(1, reason, _BY_HAND))
        return found

    def _look_at_optimizer(self, node: cst.Call) -> None:
        plain = {
            "name": (),
            "compression": ("hvd.Compression.fp16", "hvd.Compression.none"),
            "op": ("hvd.Average", "hvd.Sum"),
            "backward_passes_per_step": (1,),
            "average_aggregated_gradients": (True, False),
        }
        options = []
        for index, arg in enumerate(node.args):
            if arg.keyword is None and index > 0 or arg.star:
                return
            if arg.keyword is None or arg.keyword.value in ("optimizer", "name"):
                continue
            value = self._script.names.of(arg.value) or literal(arg.value)
            if value not in plain.get(arg.keyword.value, ()):
                return
            options.append(_OPTIONS.get(str(value)))
            self.finish(arg)
        self.options |= dict(one for one in options if one is not None)
        self.finish(node.func)

    def _look_at_fit(self, node: cst.Call) -> None:
        self.fits.append(node)
        verbose = keyword(node, "verbose")
        self._add(verbose.value if verbose is not None else None, self.verbose)
        for name, option in _STEPS.items():
            arg = keyword(node, name)
            if arg is None or literal(arg.value) is None:
                continue
            values = self._add(arg.value, self.steps)
            is_divided = any(self._is_divided(value) for value in values)
            self._divides |= is_divided and name == "steps_per_epoch"
            if not is_divided:
                self.options[option] = '"none"'

    def _add(
        self, value: cst.BaseExpression | None, to: set[cst.CSTNode]
    ) -> list[cst.BaseExpression]:
        """Note a value, or those of the name that it is."""
        if value is None:
            return []
        name = dotted(value)
        named = self._script.values(name) if name else []
        values = [value, *(one for one in named if one is not None)]
        to |= set(values)
        return values

    def _is_scaled(self, node: cst.CSTNode) -> bool:
        if not m.matches(node, m.BinaryOperation(operator=m.Multiply())):
            return False
        operation = cst.ensure_type(node, cst.BinaryOperation)
        sides = (operation.left, operation.right)
        return any(self.is_call(side, "hvd.size") for side in sides)

    def _is_divided(self, node: cst.CSTNode) -> bool:
        if not m.matches(node, m.BinaryOperation(operator=m.FloorDivide())):
            return False
        return self.is_call(
            cst.ensure_type(node, cst.BinaryOperation).right, "hvd.size"
        )
