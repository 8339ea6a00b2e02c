"""What a script says about its training, and whether one `dist_fit` does the same.

Whatever is not understood is a reason to leave the script as it is.
"""

from collections.abc import Callable, Iterator, Sequence

import libcst as cst
from libcst import matchers as m

from keras_dist.tools.migrate.arguments import keyword, literal, passed
from keras_dist.tools.migrate.command import Finding
from keras_dist.tools.migrate.script import (
    Script,
    dotted,
    inside,
    method_of,
    owner_of,
    walk,
)

BY_HAND = "Change it by hand, or migrate without --to"

# What `dist_fit` does otherwise than a name of Horovod's, where a script is refused.
_INSTEAD = {
    "hvd.allreduce": "the metrics of dist_fit are those of all ranks",
    "hvd.load_model": "keras.saving.load_model is enough",
    "hvd.elastic": "dist_fit resumes from checkpoints",
    "hvd.callbacks.LearningRateScheduleCallback": "keras.callbacks."
    "LearningRateScheduler would take the rates of one process",
    "hvd.DistributedOptimizer": "dist_fit takes only op= and compression= of it",
    "hvd.callbacks.LearningRateWarmupCallback": "the warm-up of dist_fit is one step "
    "behind Horovod's, and does not correct the momentum",
    "hvd.size": "dist_fit scales the rate itself, so this may be one too many",
}
_WARM_UP = (
    "Remove it, convert the script, and pass warmup_epochs= to dist_fit, if that is "
    "near enough"
)
_UNKNOWN = "it is none of the idioms that dist_fit replaces"

# What adds callbacks to a list.
ADDS = m.Call(func=m.Attribute(attr=m.Name("append") | m.Name("extend")))

BROADCAST = "hvd.callbacks.BroadcastGlobalVariablesCallback"
AVERAGE = "hvd.callbacks.MetricAverageCallback"
OPTIMIZER = "hvd.DistributedOptimizer"
_STEPS = {
    "steps_per_epoch": "steps_scaling",
    "validation_steps": "validation_steps_scaling",
}
_WRITING = {
    f"keras.callbacks.{name}"
    for name in ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "TensorBoard")
}
# Callbacks that read metrics, so that it matters whether these are averaged before.
_READING = _WRITING | {"keras.callbacks.EarlyStopping"}
_CALLBACKS = {
    *_READING,
    *(f"keras.callbacks.{name}" for name in ("History", "TerminateOnNaN")),
    *(AVERAGE, BROADCAST),
}
# What gives a model that is compiled already, or is another one.
_LOADED = {
    f"keras.{name}"
    for name in ("models.load_model", "saving.load_model", "models.clone_model")
}
# Values of arguments of the optimizer, as options of `dist_fit`.
_OPTIONS = {
    "hvd.Compression.fp16": ("compression", '"fp16"'),
    "hvd.Compression.none": None,
    "hvd.Sum": ("op", '"sum"'),
    "hvd.Average": None,
}
# Arguments of a Keras optimizer that mean the same to Horovod and to `dist_fit`.
_OF_OPTIMIZER = {
    *("learning_rate", "momentum", "nesterov", "rho", "beta_1", "beta_2", "epsilon"),
    *("amsgrad", "centered", "initial_accumulator_value", "weight_decay", "clipnorm"),
    *("clipvalue", "global_clipnorm", "name"),
}

# Calls, by their last word, and names that a script with one `dist_fit` cannot have.
_LOOP = "it trains beside dist_fit, where no gradient is averaged"
_CALLS = {
    "train_on_batch": _LOOP,
    "apply_gradients": _LOOP,
    "GradientTape": _LOOP,
    "minimize": _LOOP,
    "set_weights": "it changes weights, and dist_fit does so, too",
    **dict.fromkeys(
        ("locals", "globals", "vars", "exec", "eval"), "it may read any other name"
    ),
}
_SCHEDULE = "it sets or reads the rate, which dist_fit scales"
_ROWS = "Horovod counts each rank the same, and dist_fit each row"
_NAMES = {
    "keras.callbacks.LearningRateScheduler": _SCHEDULE,
    "keras.callbacks.ReduceLROnPlateau": _SCHEDULE,
    "keras.optimizers.schedules": "a schedule counts a rank's steps, and dist_fit "
    "those of one process",
    "keras.layers.Masking": _ROWS,
}
_ATTRIBUTES = {
    "optimizer": "the optimizer of a model is dist_fit's while it trains, and has the "
    "rate of one process",
    "learning_rate": _SCHEDULE,
}
_KEYWORDS = {
    "mask_zero": _ROWS,
    "synchronized": "dist_fit normalizes by the rows of all ranks",
    "reduction": "dist_fit applies it to the rows of all ranks",
    "weighted_metrics": _ROWS,
    "sample_weight": _ROWS,
}
_DRAWING = ("Dropout", "Noise", "Random")
_SEEDS = ("seed", "set_seed", "set_random_seed")
_METHODS = ("train_step", "compute_loss", "apply_gradients")


# Methods of a `tf.data.Dataset` that give the same global batches, whether they are
# called on a rank's elements or on all: methods of single elements, and of batches.
_OF_ELEMENTS = ("map", "cache", "prefetch", "with_options", "shuffle", "batch")
_OF_BATCHES = ("map", "cache", "prefetch", "with_options")


class Plan:
    """Which lines of a script `dist_fit` replaces, and its options; or why it cannot.

    Args:
        script: The file, on Keras 3 and `keras_dist.horovod`.
    """

    def __init__(self, script: Script):
        self.options: dict[str, str] = {}
        self.fits: list[cst.Call] = []
        self.rates: set[cst.CSTNode] = set()
        self.steps: set[cst.CSTNode] = set()
        self.verbose: set[cst.CSTNode] = set()
        self.done: set[cst.CSTNode] = set()
        self.refusals: list[Finding] = []
        self._script = script
        self._compiled: cst.BaseExpression | None = None  # its optimizer
        self.data = Data(script, self.refuse)
        self._refuse_what_differs()
        self.fits = [one for one in self._script.calls if self._is_fit(one)]
        if len(self.fits) != 1:
            reason = f"dist_fit replaces one model.fit, and there are {len(self.fits)}"
            self.refuse(self.fits[1] if self.fits else script.module, reason)
            return
        self._look_at_fit(self.fits[0])
        self._look_at_optimizer()
        self._look_at_callbacks()
        self._look_at_data(self.fits[0])

    def finish_refusals(self) -> list[Finding]:
        """Return the reasons against a conversion; empty if there is none."""
        found = list(self.refusals)
        for node in self._uses():
            if node not in self.done:
                name = self._script.names.of(node) or ""
                known = [text for key, text in _INSTEAD.items() if name.startswith(key)]
                reason = f"{name} is used here, and {[*known, _UNKNOWN][0]}"
                advice = _WARM_UP if name.endswith("WarmupCallback") else BY_HAND
                found.append(Finding(self._script.line(node), reason, advice))
        return found

    def refuse(self, node: cst.CSTNode, reason: str, advice: str = BY_HAND) -> None:
        """Note a reason against a conversion."""
        self.refusals.append(Finding(self._script.line(node), reason, advice))

    def _uses(self) -> Iterator[cst.CSTNode]:
        """Yield each use of Horovod, by its longest name, or of its module."""
        script = self._script
        for node in script.nodes:
            if script.is_longest(node) and script.is_read(node):
                name = script.names.of(node) or ""
                if name == "hvd" or name.startswith("hvd."):
                    yield node

    def _refuse_what_differs(self) -> None:
        """Refuse what has another meaning beside `dist_fit`, wherever it is."""
        script = self._script
        for call in self._script.calls:
            word = _last_word(call)
            if word in _CALLS:
                self.refuse(call, f"{word} is called here: {_CALLS[word]}")
            for arg in call.args:
                name = arg.keyword.value if arg.keyword is not None else ""
                is_default = literal(arg.value) in (None, False, "sum_over_batch_size")
                if name in _KEYWORDS and not is_default:
                    self.refuse(call, f"{name}= is passed here: {_KEYWORDS[name]}")
        for node in script.nodes:
            if isinstance(node, (cst.Attribute, cst.Name)) and script.is_read(node):
                self._refuse_name(node)
            elif isinstance(node, cst.ClassDef):
                self._refuse_class(node)

    def _refuse_name(self, node: cst.Attribute | cst.Name) -> None:
        name = self._script.names.of(node) or ""
        is_whole = self._script.is_longest(node)
        for known, reason in _NAMES.items():
            if is_whole and f"{name}.".startswith(f"{known}."):
                self.refuse(node, f"{name} is used here: {reason}")
        word = node.attr.value if isinstance(node, cst.Attribute) else ""
        if name or word not in _ATTRIBUTES:
            return
        owner = cst.ensure_type(node, cst.Attribute).value
        makers = [one for one in self._values(owner) if isinstance(one, cst.Call)]
        is_option = any("parse" in (dotted(one.func) or "") for one in makers)
        if not is_option:
            self.refuse(node, f".{word} is used here: {_ATTRIBUTES[word]}")

    def _refuse_class(self, node: cst.ClassDef) -> None:
        bases = [self._script.names.of(base.value) or "" for base in node.bases]
        if any(name.startswith("keras.callbacks.") for name in bases):
            reason = (
                "what a callback of the script's own does on each rank is not known"
            )
            self.refuse(node.name, reason)
        for one in walk(node):
            if isinstance(one, cst.FunctionDef) and one.name.value in _METHODS:
                reason = (
                    f"{one.name.value} is the script's own, and may train otherwise"
                )
                self.refuse(one.name, reason)

    def _is_fit(self, node: cst.Call) -> bool:
        """Tell whether this is `fit` of a model, or of what may be one."""
        owner = owner_of(node)
        if method_of(node) != "fit" or self._script.names.of(owner) is not None:
            return False
        values = self._script.values(dotted(owner) or "")
        names = [self._script.maker(value) for value in values]
        # Another library makes its own, as a `StandardScaler()`.
        return not names or any(
            name is None or name.startswith(("keras", "tf")) for name in names
        )

    def _look_at_fit(self, fit: cst.Call) -> None:
        unnamed = [arg for arg in fit.args if arg.keyword is None]
        if any(arg.star for arg in fit.args) or len(unnamed) > 4:
            self.refuse(fit, "the arguments of fit are not known here")
        if self._script.is_in_loop(fit):
            self.refuse(
                fit, "fit is called in a loop, and dist_fit begins anew each time"
            )
        verbose = keyword(fit, "verbose")
        if verbose is not None:
            self._add_verbose(verbose.value)
        for name, option in _STEPS.items():
            arg = keyword(fit, name)
            if arg is None or literal(arg.value) is None:
                continue
            # Steps stay per rank: dist_fit rounds up what a script rounds down.
            self.options[option] = '"none"'
            for value in self._values(arg.value):
                self.steps |= {one for one in walk(value) if isinstance(one, cst.Call)}
        self._look_at_model(fit)

    def _add_verbose(self, value: cst.BaseExpression) -> None:
        values = self._values(value)
        self.verbose |= set(values)
        if any(isinstance(one, cst.IfExp) for one in values[1:]):
            self._refuse_other_reads(value, "is 1 on all ranks then")

    def _values(self, value: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return a value, and all that the file assigns to it if it is a name."""
        name = dotted(value)
        named = self._script.values(name) if name else []
        return [value, *(one for one in named if one is not None)]

    def _refuse_other_reads(self, read: cst.CSTNode, reason: str) -> None:
        """Refuse a script that reads a name whose value changes."""
        name = dotted(read) or ""
        if "." in name:
            self.refuse(read, f"{name}, which other code may read, too, {reason}")
            return
        if len(self._script.values(name)) > 1:
            self.refuse(read, f"{name} is assigned more than once, and {reason}")
        for other in self._script.reads(name):
            if other is not read:
                self.refuse(other, f"{name} is read here, too, and {reason}")

    def _look_at_model(self, fit: cst.Call) -> None:
        """Check that the model that is fitted is the one compiled for Horovod."""
        script = self._script
        compiles = [
            one
            for one in script.calls
            if method_of(one) == "compile" and script.names.of(one.func) is None
        ]
        if len(compiles) != 1:
            reason = (
                f"the file compiles {len(compiles)} models, and dist_fit trains one"
            )
            self.refuse(compiles[1] if compiles else fit, reason)
            return
        compiled = passed(compiles[0], "optimizer", 0)
        makers = [script.maker(one) for one in script.values_of(compiled)]
        is_ours = all(maker == OPTIMIZER for maker in makers)
        if not is_ours or not self._is_same(owner_of(fit), owner_of(compiles[0])):
            reason = "the model that is fitted is not the one that is compiled with "
            self.refuse(compiles[0], f"{reason}hvd.DistributedOptimizer here")
        self._compiled = compiled

    def _is_same(
        self, node: cst.BaseExpression, model: cst.BaseExpression, depth: int = 0
    ) -> bool:
        """Tell whether two expressions are the same model, also through functions."""
        script = self._script
        name, values = dotted(node), script.values_of(node)
        own = script.values_at(dotted(model) or "", model)
        loaded = [one for one in values if script.maker(one) in _LOADED]
        if isinstance(node, cst.Call):
            return self._is_made(node, node, model, depth)
        if depth > 8 or name is None or loaded:
            return False
        is_here = script.function_of(node) is script.function_of(model)
        if name == dotted(model) and values == own and (is_here or None not in own):
            return True
        return bool(values) and all(
            self._is_made(value, node, model, depth)
            or (value is not None and value in own)
            for value in values
        )

    def _is_made(
        self,
        value: cst.BaseExpression | None,
        node: cst.BaseExpression,
        model: cst.BaseExpression,
        depth: int,
    ) -> bool:
        """Tell whether a value of a name is the model: by a name, or by a function."""
        script = self._script
        if value is None:  # a parameter, perhaps
            function = script.function_of(node)
            found = [
                passed(call, dotted(node) or "", index)
                for call in self._script.calls
                if isinstance(function, cst.FunctionDef)
                and dotted(call.func) == function.name.value
                for index, param in enumerate(function.params.params)
                if param.name.value == dotted(node)
            ]
            return bool(found) and all(
                one is not None and self._is_same(one, model, depth + 1)
                for one in found
            )
        if isinstance(value, cst.Call):
            inside = script.function_of(model)
            return (
                isinstance(inside, cst.FunctionDef)
                and dotted(value.func) == inside.name.value
                and all(
                    dotted(one.value) == dotted(model)
                    for one in walk(inside.body)
                    if isinstance(one, cst.Return)
                )
            )
        return self._is_same(value, model, depth + 1)

    def _look_at_optimizer(self) -> None:
        """Look at the one optimizer, its rate, and how it averages."""
        script = self._script
        ours = [one for one in script.calls if script.maker(one) == OPTIMIZER]
        made = [one for one in script.calls if script.optimizer_class(one) is not None]
        if len(ours) != 1 or len(made) != 1:
            reason = "dist_fit needs one optimizer and one hvd.DistributedOptimizer of "
            reason += f"it, and there are {len(made)} and {len(ours)}"
            self.refuse([script.module, *made, *ours][-1], reason)
            return
        inner = passed(ours[0], "optimizer", 0)
        values = [one for one in script.values_of(inner) if one is not ours[0]]
        if values != made:
            self.refuse(ours[0], "which optimizer this is is not known here")
        for name in {dotted(inner), dotted(self._target_of(ours[0]))} - {None}:
            for read in script.reads(str(name)):
                if read is not inner and read is not self._compiled:
                    reason = "it is read here, too, and does not average then"
                    self.refuse(read, f"{name} is the optimizer: {reason}")
        self._look_at_options(ours[0])
        for arg in made[0].args[1:] if not _is_named(made[0]) else made[0].args:
            name = arg.keyword.value if arg.keyword is not None else ""
            if name not in _OF_OPTIMIZER:
                self.refuse(
                    arg.value, f"argument {name or 'without a name'} of an optimizer"
                )
        self._look_at_rate(passed(made[0], "learning_rate", 0))

    def _target_of(self, value: cst.CSTNode) -> cst.CSTNode | None:
        for node in self._script.nodes:
            if isinstance(node, cst.Assign) and node.value is value:
                return node.targets[0].target
        return None

    def _look_at_rate(self, rate: cst.BaseExpression | None) -> None:
        values = self._values(rate) if rate is not None else []
        scaled = [one for one in values if self._is_scaled(one)]
        if not scaled:
            self.options["lr_scaling"] = '"none"'
            return
        self.rates |= set(scaled)
        if rate is not None and rate not in scaled:
            self._refuse_other_reads(rate, "is not multiplied by the ranks then")

    def _look_at_options(self, node: cst.Call) -> None:
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

    def _look_at_callbacks(self) -> None:
        """Look for callbacks that are unknown: they may do anything."""
        fit, script = self.fits[0], self._script
        given = passed(fit, "callbacks", 5)
        lists = self._values(given) if given is not None else []
        lists = lists[1:] or lists  # what the name is, or the list itself
        elements: list[cst.BaseExpression] = []
        for one in lists:
            if not isinstance(one, (cst.List, cst.Tuple)):
                self.refuse(one, "which callbacks these are is not known here")
                return
            elements += [element.value for element in one.elements]
        order = [self._kind(element) for element in elements]
        known = {id(given)}
        for call in script.calls:
            owner = owner_of(call)
            is_same = owner is not None and dotted(owner) == dotted(given)
            if is_same and given is not None and m.matches(call, ADDS) and call.args:
                known.add(id(owner))
                elements += _elements(call.args)
        for read in script.reads(dotted(given) or ""):
            if id(read) not in known:
                reason = "which callbacks these are is not known, as they are used here"
                self.refuse(read, reason)
        kinds = [self._kind(element) for element in elements]
        for node, kind in zip(elements, kinds, strict=True):
            if kind not in _CALLBACKS and not str(kind).startswith("hvd."):
                self.refuse(node, "what this callback does on each rank is not known")
        for needed in (BROADCAST, AVERAGE):
            if needed not in kinds:
                short = needed.removeprefix("hvd.callbacks.")
                reason = f"there is no {short}, so that each rank has values of its own"
                self.refuse(fit, reason, "Add it, and convert the script then")
        if AVERAGE in order and any(
            kind in _READING for kind in order[: order.index(AVERAGE)]
        ):
            reason = (
                "a callback before MetricAverageCallback reads a rank's own metrics"
            )
            self.refuse(fit, reason, "Put it behind")
        if "keras.layers.BatchNormalization" in map(script.names.of, script.nodes):
            self._note_statistics()

    def _note_statistics(self) -> None:
        self._script.note(
            self.fits[0],
            "the moving statistics of BatchNormalization are those of all ranks then, "
            "and Horovod has those of one rank",
            "Results of an evaluation may differ by that",
        )

    def _kind(self, node: cst.BaseExpression) -> str | None:
        """Return the class of a callback, also through a name."""
        kinds = {self._script.maker(one) for one in self._script.values_of(node)}
        return kinds.pop() if len(kinds) == 1 else None

    def _look_at_data(self, fit: cst.Call) -> None:
        found = self.data.look(fit)
        for node in self.data.shards:
            inner = node.args if isinstance(node, cst.Call) else node.slice  # type: ignore[attr-defined]
            for part in inner:
                self.finish(part)
        if not found:
            self.options["shard"] = '"none"'  # each rank reads all of it, as before
        self._refuse_seeds(fit, is_sharded=found)

    def _refuse_seeds(self, fit: cst.Call, *, is_sharded: bool) -> None:
        """Refuse what a seed fixes: `dist_fit` has another order, and draws others."""
        shuffle = passed(fit, "shuffle", 8)
        are_arrays = any(isinstance(one, cst.Subscript) for one in self.data.shards)
        is_shuffled = are_arrays and (shuffle is None or literal(shuffle) is not False)
        draws, seeds = False, []
        for call in self._script.calls:
            word = _last_word(call)
            is_shuffled |= word == "shuffle"
            layer = self._script.names.of(call.func) or ""
            draws |= layer.startswith("keras.layers.") and (
                any(kind in word for kind in _DRAWING)
                or keyword(call, "dropout") is not None
            )
            if word in _SEEDS or keyword(call, "seed") is not None:
                seeds.append(call)
        if draws and seeds:
            reason = "this fixes what a layer draws, and dist_fit draws other numbers"
            self.refuse(seeds[0], reason, "Remove the seed")
        is_shuffled &= is_sharded
        if is_shuffled and seeds:
            reason = (
                "this fixes the order of each rank's rows, and dist_fit has another"
            )
            self.refuse(seeds[0], reason, "Remove the seed, or pass shuffle=False")

    def writes(self, args: Sequence[cst.Arg]) -> bool:
        """Tell whether callbacks that are added to a list are of Keras and write files.

        `dist_fit` runs them on the first rank by itself, and others on all ranks.
        """
        found = _elements(args)
        return bool(found) and all(self._kind(one) in _WRITING for one in found)

    def finish(self, node: cst.CSTNode) -> None:
        """Note that all uses of Horovod in a node are replaced."""
        self.done |= set(m.findall(node, m.Attribute()))

    def _is_scaled(self, node: cst.CSTNode) -> bool:
        if not isinstance(node, cst.BinaryOperation):
            return False
        sides = (node.left, node.right)
        is_by_size = any(self._script.is_call(side, "hvd.size") for side in sides)
        return is_by_size and isinstance(node.operator, cst.Multiply)


def _elements(args: Sequence[cst.Arg]) -> list[cst.BaseExpression]:
    """Return what `append` or `extend` adds to a list."""
    found: list[cst.BaseExpression] = []
    for arg in args:
        if isinstance(arg.value, (cst.List, cst.Tuple)):
            found += [one.value for one in arg.value.elements]
        else:
            found.append(arg.value)
    return found


def _last_word(call: cst.Call) -> str:
    """Return the name of the function that is called, without dots."""
    return method_of(call) or dotted(call.func) or ""


def _is_named(call: cst.Call) -> bool:
    """Tell whether the first argument is passed by name, or missing."""
    return not call.args or call.args[0].keyword is not None


class Data:
    """The data of one `fit`, and the shards in it.

    Args:
        script: The file.
        refuse: Called with what speaks against a conversion: a node, and why.
    """

    def __init__(self, script: Script, refuse: Callable[[cst.CSTNode, str], None]):
        self.shards: set[cst.CSTNode] = set()
        self._script = script
        self._refuse = refuse
        self._all = {one for one in script.nodes if self.is_shard(one)}
        self._known: dict[cst.CSTNode, bool] = {}
        self._fit: cst.CSTNode = script.module
        self._read: set[cst.CSTNode] = set()

    def look(self, fit: cst.Call) -> bool:
        """Tell whether the data is sharded.

        Args:
            fit: The call of `fit`.
        """
        if not self._all:
            return False
        self._fit = fit
        training = self._are_sharded(
            [passed(fit, "x", 0), passed(fit, "y", 1)], "of x and y"
        )
        validation = self._are_sharded(
            _arrays_of(passed(fit, "validation_data", 7)), "of the validation data"
        )
        self._check(fit, bool(training), validation)
        reason = "a rank's part of some data is used for something else than fit"
        for node in self._all - self.shards:
            self._refuse(node, reason)
        self._check_reads()
        return bool(training)

    def _check(self, fit: cst.Call, is_sharded: bool, validation: bool | None) -> None:
        """List what `dist_fit` reads differently, if it divides the data itself."""
        if validation and not is_sharded:
            reason = "only validation data is sharded, and dist_fit would shard all"
            self._refuse(fit, reason)
        if not is_sharded:
            return
        split = keyword(fit, "validation_split")
        if split is not None and literal(split.value) != 0:
            reason = "validation_split takes the end of each rank's rows here, and of "
            self._refuse(fit, f"{reason}all rows with dist_fit")
        steps = keyword(fit, "validation_steps")
        has_steps = steps is not None and literal(steps.value) is not None
        if has_steps and passed(fit, "validation_data", 7) and not validation:
            reason = "each rank reads the same validation_steps batches here, and with "
            self._refuse(fit, f"{reason}dist_fit each rank others")

    def is_shard(self, node: cst.CSTNode) -> bool:
        """Tell whether this is the part of some data that a rank reads."""
        if isinstance(node, cst.Call):
            values: list[cst.CSTNode | None] = [arg.value for arg in node.args]
            is_method = method_of(node) == "shard"
        elif isinstance(node, cst.Subscript) and len(node.slice) == 1:
            index = node.slice[0].slice
            is_method = isinstance(index, cst.Slice) and index.upper is None
            values = [index.step, index.lower] if isinstance(index, cst.Slice) else []
        else:
            return False
        names = ["hvd.size", "hvd.rank"]
        is_ours = len(values) == 2 and all(map(self._script.is_call, values, names))
        return is_method and is_ours

    def _depends(self, node: cst.CSTNode) -> bool:
        """Tell whether an expression contains a rank's part of the data, in any way.

        The result of `fit` belongs to all ranks, by the `MetricAverageCallback`.
        """
        if node not in self._known:
            self._known[node] = self._reaches_shard(node)
        return self._known[node]

    def _reaches_shard(self, node: cst.CSTNode) -> bool:
        stack, seen = [node], set()
        while stack:
            found = stack.pop()
            is_new = found not in seen and found is not self._fit
            seen.add(found)
            if not is_new:
                continue
            if found in self._all:
                return True
            stack += inside(found)
            if isinstance(found, cst.Name) and self._script.is_read(found):
                values = self._script.values_at(found.value, found)
                stack += [value for value in values if value is not None]
        return False

    def _are_sharded(
        self, nodes: Sequence[cst.BaseExpression | None], what: str
    ) -> bool | None:
        """Tell whether all are sharded; add a reason if only some are, or unknown."""
        found = [(one, self._is_sharded(one)) for one in nodes if one is not None]
        kinds = {kind for _, kind in found}
        for node, kind in found:
            if kind is None:
                self._refuse(node, "how this data is sharded is not understood")
        if None not in kinds and len(kinds) > 1:
            self._refuse(found[0][0], f"only a part {what} is sharded")
        return True in kinds

    def _is_sharded(self, node: cst.BaseExpression, depth: int = 0) -> bool | None:
        """Tell whether an expression is a rank's part; `None` if not understood."""
        if not self._depends(node):
            return False
        if depth > 8:
            return None
        if self.is_shard(node):
            inner = node.value if isinstance(node, cst.Subscript) else owner_of(node)  # type: ignore[arg-type]
            if self._is_sharded(inner, depth + 1) is not False:
                return None
            self.shards.add(node)
            return True
        if isinstance(node, cst.Name):
            values = self._script.values_at(node.value, node)
            self._read.add(node)
            # A shard that is unpacked is not reached, and so a reason by itself.
            kinds = {v is not None and self._is_sharded(v, depth + 1) for v in values}
            return kinds.pop() if len(kinds) == 1 else None
        if isinstance(node, cst.Call) and method_of(node):
            return self._is_chain_sharded(node, depth)
        return None

    def _is_chain_sharded(self, node: cst.Call, depth: int) -> bool | None:
        """`data.shard(…).map(f).batch(32)`."""
        method, inner = method_of(node), owner_of(node)
        is_batched = self._is_batched(inner)
        allowed = _OF_BATCHES if is_batched else _OF_ELEMENTS
        # A seed gives an order of its own, and a dropped remainder another one.
        is_plain = method not in ("shuffle", "batch") or len(node.args) == 1
        if method not in allowed or not is_plain:
            return None
        if any(self._depends(arg.value) for arg in node.args):
            return None
        return self._is_sharded(inner, depth + 1)

    def _is_batched(self, node: cst.BaseExpression, depth: int = 0) -> bool:
        """Tell whether a chain calls `batch` behind the shard."""
        if depth > 8 or self.is_shard(node):
            return False
        if isinstance(node, cst.Name):
            values = self._script.values_at(node.value, node)
            return any(v is not None and self._is_batched(v, depth + 1) for v in values)
        if not isinstance(node, cst.Call) or not method_of(node):
            return False
        is_batch = method_of(node) == "batch"
        return is_batch or self._is_batched(owner_of(node), depth + 1)

    def _check_reads(self) -> None:
        """List reads of sharded data elsewhere, where it would no longer be a shard."""
        for name in self._script.assigned():
            values = self._script.values(name)
            if not any(value is not None and self._depends(value) for value in values):
                continue
            for node in self._script.reads(name):
                reaching = self._script.values_at(name, node)
                is_part = any(v is not None and self._depends(v) for v in reaching)
                if node not in self._read and is_part:
                    reason = "is a rank's part here, and all of it with dist_fit"
                    self._refuse(node, f"{name} {reason}")


def _arrays_of(node: cst.BaseExpression | None) -> list[cst.BaseExpression | None]:
    """Return the arrays of validation data."""
    if isinstance(node, cst.Tuple):
        return [one.value for one in node.elements]
    return [node]
