"""Try on the first batch whether a train step's gradients are means or sums over rows.

The gradients of the whole batch, as they reach `Optimizer.apply`, are compared with
those of two parts of it, which are taken for the batches of two ranks. If their mean,
weighted by rows, is the gradient of the whole, N ranks that average their gradients
train the model of one process. If their sum is, gradients are added up instead. If
neither is, there is a warning with the difference in percent.

Numbers that can be multiplied by themselves are tried in the same runs, by their
values: losses of `compile` and of `add_loss`, `Mean` trackers, and what the step logs.
Those that come later are tried after those before them are right (`_LEVELS`).

In a trial, `Dropout` and its kin are off, and `BatchNormalization` uses the statistics
of the whole batch. A step that draws random numbers otherwise is tried with rows that
are repeated: that multiplies a sum, and not a mean. Afterwards all variables have the
values that they had before.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.data.draws import preserve_generators
from keras_dist.optimizer import (
    Recorded,
    optimizers_of,
    step_context,
    variables_of,
)
from keras_dist.optimizer.step_context import LossKinds, Site, StepContext
from keras_dist.training.batch_norm import share_moments
from keras_dist.training.losses import is_number, num_rows
from keras_dist.training.remember import list_variables, preserve_variables
from keras_dist.training.state_trial import (
    State,
    StateDifference,
    compare_states,
    find_stray_variables,
    list_watched_variables,
    warn_of_states,
)

# In the order in which they depend on one another.
_LEVELS = ("loss", "compute", "tracker", "log")

# Elements of a weight's gradient that are compared, evenly spread.
_MOST_ELEMENTS = 2**14

# Gradients, and numbers, are equal if they differ by less, of the whole: rounding.
_TOLERANCE, _TOLERANCE_OF_NUMBERS, _TOLERANCE_IN_HALF = 2e-3, 1e-4, 5e-2

# How often rows are repeated where a step is random, and how often that is run.
_TIMES, _RUNS = 4, 4

# Numbers of a step that are tried.
_MOST_NUMBERS = 1023

# At the start the scale of Keras lets many gradients of float16 overflow.
_LOSS_SCALE = 128.0

# Layers that are random, and what makes them so.
_RANDOM = (
    (keras.layers.Dropout, "rate"),
    (keras.layers.GaussianDropout, "rate"),
    (keras.layers.AlphaDropout, "rate"),
    (keras.layers.GaussianNoise, "stddev"),
    (keras.layers.LSTMCell, "dropout"),
    (keras.layers.LSTMCell, "recurrent_dropout"),
    (keras.layers.GRUCell, "dropout"),
    (keras.layers.GRUCell, "recurrent_dropout"),
    (keras.layers.SimpleRNNCell, "dropout"),
    (keras.layers.SimpleRNNCell, "recurrent_dropout"),
)


@dataclass(frozen=True)
class Verdict:
    """What the gradients of one update are of the rows.

    Args:
        kind: "mean", "sum" or "neither".
        difference: By how much the weighted mean of the parts differs from the whole,
            of the length of the whole; of a sum, their sum. `None` if rows were
            repeated instead.
    """

    kind: str
    difference: float | None = None


@dataclass(frozen=True)
class Trial:
    """What the ranks found together.

    Args:
        verdicts: One for each update of the step.
        kinds: What is to be added up, or computed from the rows of all ranks.
        reason: Why the step was not tried; "" if it was.
        weights: For each weight, by how much its gradient differs.
        states: Metrics and other state that the parts do not add up to.
        seconds: How long it took.
    """

    verdicts: tuple[Verdict, ...] = ()
    kinds: LossKinds = LossKinds()
    reason: str = ""
    weights: dict[str, float] = field(default_factory=dict)
    states: tuple[StateDifference, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.reason:
            return f"not tried, taken for a mean over rows: {self.reason}"
        parts = []
        for verdict in self.verdicts:
            text = {"mean": "mean over rows", "sum": "sum over rows"}.get(verdict.kind)
            if text is None:
                text = f"neither mean nor sum ({_percent(verdict.difference)})"
            parts.append(text)
        summed = sum(level == "loss" for level, _ in self.kinds.sums)
        counted = f", with {summed} summed loss{'es' * (summed > 1)}" * bool(summed)
        counted += ", gathered" * bool(self.kinds.gathered)
        return f"{'; '.join(parts)}{counted}; tried in {self.seconds:.1f} s"


@dataclass(frozen=True)
class Run:
    """What one run of a step gave.

    Args:
        gradients: For each update, by the weight's path: some elements of its gradient;
            or the values and indices of a sparse one.
        numbers: Values by their site.
        shared: Tensors that the runs of parts need.
        state: Values of metrics and of layers' state afterwards.
    """

    gradients: list[dict[str, Any]]
    numbers: dict[Site, float]
    shared: list[Any]
    state: State


@dataclass(frozen=True)
class Found:
    """What one rank found; a kind is `None` where all was 0, or not finite.

    Args:
        verdicts: Kind and difference of each update.
        numbers: The kind of each number.
        gatherable: Losses that can be computed from the rows of all ranks.
        weights: For each weight, by how much its gradient differs.
        states: Metrics and other state that the parts do not add up to.
    """

    verdicts: list[tuple[str | None, float | None]]
    numbers: dict[Site, str | None]
    gatherable: set[Site]
    weights: dict[str, float]
    states: list[StateDifference]


def try_step(model: Any, step: Callable[[Any], Any], data: Any) -> Trial:
    """Try a train step on this rank's first batch; all ranks call this.

    Args:
        model: The model; all of its variables exist.
        step: Its `train_step`, whose losses are parts of the global batch
            (`losses.split_step`).
        data: This rank's first batch, as numbers.
    """
    begin = time.monotonic()
    reason = explain_untriable(data)
    # A step may communicate: all ranks run it, or none.
    reason = next(filter(None, comm.gather(reason)), "")
    found: Found | str = reason or find_kinds(model, step, data)
    return _merge(comm.gather(found), time.monotonic() - begin)


def find_kinds(model: Any, step: Callable[[Any], Any], data: Any) -> Found | str:
    """Try a step on this rank alone; an error is returned in words."""
    try:
        with preserve_generators(), _without_noise(model), share_moments(model):
            return _find(_Runner(model, step, data))
    except Exception as error:  # whatever a user's step raises on fewer rows
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    finally:
        private.clear_losses(model)


def explain_untriable(data: Any) -> str:
    """Say why a batch has no parts; "" if it does."""
    if os.environ.get("KERAS_DIST_TRIAL") == "0":
        return "KERAS_DIST_TRIAL=0"
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not leaves or any(not len(leaf.shape) for leaf in leaves):
        return "the batch has no axis of rows"
    lengths = {int(leaf.shape[0]) for leaf in leaves}
    if len(lengths) > 1:
        return "the parts of the batch differ in length"
    return "the batch has one row" if lengths.pop() < 2 else ""


def _find(runner: "_Runner") -> Found:
    """Compare the whole batch with two parts, which are not equally long."""
    rows = runner.rows
    cut = max(1, rows // 3)
    cuts = [(0, cut), (cut, rows)]
    fractions = [(end - begin) / rows for begin, end in cuts]
    with runner.preserve_seeds():
        whole = runner.run_whole()
        if not whole.gradients:
            return Found([], {}, set(), {}, [])
        parts = [runner.run_part(whole, *cut) for cut in cuts]
        kinds: dict[Site, str | None] = {}
        for level in _LEVELS:
            found = {
                site: runner.kind_of(value, [p.numbers[site] for p in parts], fractions)
                for site, value in whole.numbers.items()
                if site[0] == level and all(site in part.numbers for part in parts)
            }
            kinds |= found
            if runner.set_kinds(found):
                parts = [runner.run_part(whole, *cut) for cut in cuts]
        verdicts, weights = runner.compare_updates(whole, parts, fractions)
        in_doubt = {
            site
            for site in runner.memory.gathered
            if kinds.get(site) == "mean" and any(k == "neither" for k, _ in verdicts)
        }
        # A value may be the mean of the parts' where the gradient is not.
        if runner.set_kinds(dict.fromkeys(in_doubt, "neither")):
            parts = [runner.run_part(whole, *cut) for cut in cuts]
            others = runner.compare_updates(whole, parts, fractions)
            if [k for k, _ in others[0]] != [k for k, _ in verdicts]:
                kinds |= dict.fromkeys(in_doubt, "neither")
                verdicts, weights = others
        states = compare_states(
            runner.model, whole.state, [part.state for part in parts], fractions
        )
        has_doubt = bool(states) or any(kind == "neither" for kind, _ in verdicts)
        if has_doubt and runner.is_random(whole):
            return _find_by_repeating(runner)
    gathered = set(runner.memory.gathered)
    return Found(verdicts, kinds, gathered, weights, [*states, *runner.strays])


def _find_by_repeating(runner: "_Runner") -> Found:
    """Compare some rows with the same rows repeated: that multiplies a sum.

    Random numbers make all of their gradients differ, by less the more rows there are.
    So a mean becomes shorter, by at most √4, and a sum longer, by at least √4.
    """
    kinds: dict[Site, str | None] = {}
    runner.set_kinds(None)

    def run_both() -> tuple[list[Run], list[Run]]:
        few = [runner.run_repeated(1) for _ in range(_RUNS)]
        return few, [runner.run_repeated(_TIMES) for _ in range(_RUNS)]

    both = run_both()
    for level in _LEVELS:
        found: dict[Site, str | None] = {}
        for site in both[0][0].numbers:
            if site[0] == level:
                before, after = (
                    abs(np.mean([run.numbers[site] for run in runs])) for runs in both
                )
                found[site] = _kind_of_growth(before, after, _TIMES**0.5)
        kinds |= found
        if runner.set_kinds(found):
            both = run_both()
    verdicts: list[tuple[str | None, float | None]] = []
    for index in range(len(both[0][0].gradients)):
        before, after = (
            np.mean([_length(run.gradients[index].values()) for run in runs])
            for runs in both
        )
        verdicts.append((_kind_of_growth(before, after, _TIMES**0.25), None))
    return Found(verdicts, kinds, set(), {}, runner.strays)


class _TrialRun:
    """See `step_context.TrialRun`.

    Args:
        begin: The first row of this part.
        fraction: The rows of this part, of those of the whole.
        kinds: What is known of each number: 1 for a sum, 2 for a gathered loss.
        shared: What the run of the whole shared; `None` in that run.
        memory: What all runs have in common.
    """

    def __init__(
        self, begin: Any, fraction: Any, kinds: Any, shared: Any, memory: "_Memory"
    ) -> None:
        self._begin, self._fraction, self._kinds = begin, fraction, kinds
        self._is_whole, self._next, self._is_muted = shared is None, 0, False
        self._memory = memory
        self.shared = [] if shared is None else list(shared)
        self.numbers: dict[Site, Any] = {}
        self.has_gathered = False

    def share(self, value: Any) -> Any:
        if self._is_whole:
            self.shared.append(value)
            return value
        self._next += 1
        return tf.ensure_shape(self.shared[self._next - 1], value.shape)

    def gather(self, rows: Any, *, is_known: bool = False) -> Any:
        self.has_gathered |= not is_known
        if self._is_whole:
            self.shared.append(rows)
            return rows
        whole = self.shared[self._next]
        self._next += 1
        if rows.dtype.is_floating:
            # Gradients are averaged by rows, and this is a part of the whole's.
            factor = tf.cast(1 / self._fraction, rows.dtype)
            rows = rows * factor + tf.stop_gradient(rows - rows * factor)
        end = self._begin + tf.shape(rows)[0]
        return tf.concat([whole[: self._begin], rows, whole[end:]], 0)

    def note(self, site: Site, value: Any) -> None:
        if not self._is_muted:
            self.numbers[site] = tf.cast(value, tf.float64)

    def is_sum(self, site: Site) -> Any:
        return tf.equal(self._kind(site), 1)

    def choose(
        self,
        site: Site,
        plain: Callable[[], Any],
        gathered: Callable[[], Any],
        inverse_fraction: Callable[[Any], Any],
    ) -> Any:
        begin, value = self._next, plain()
        if not is_number(value):
            return value
        self.note(site, value)
        middle, factor = self._next, inverse_fraction(value.dtype)
        factor = tf.where(self.is_sum(site), factor, 1)
        memory = self._memory
        if self._is_whole:
            before = len(self.shared)
            if gathered() is not None:  # it shares the rows
                memory.gathered[site] = len(self.shared) - before
        if self._is_whole or site not in memory.gathered:
            return value * factor

        def replay(function: Callable[[], Any], position: int) -> Any:
            self._next, self._is_muted = position, True
            result = function()
            self._is_muted = False
            return result

        # Computed again: `value` may be NaN, and so would be its gradient, times 0.
        value = tf.cond(
            tf.equal(self._kind(site), 2),
            lambda: replay(gathered, middle),
            lambda: replay(plain, begin) * factor,
        )
        self._next = middle + memory.gathered[site]
        return value

    def _kind(self, site: Site) -> Any:
        places = self._memory.places
        return self._kinds[places.setdefault(site, len(places) % _MOST_NUMBERS)]


@dataclass
class _Memory:
    """What the runs of a step have in common.

    Args:
        places: Where the kind of each number stands.
        gathered: For each loss that can be gathered, how many tensors it shares.
    """

    places: dict[Site, int] = field(default_factory=dict)
    gathered: dict[Site, int] = field(default_factory=dict)


class _Runner:
    """Runs a train step on parts of a batch, and takes back what it does.

    In a graph the step is traced twice: for the whole batch, and for any part of it.

    Args:
        model: The model.
        step: Its train step.
        data: The whole batch.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], data: Any) -> None:
        self.model, self._step = model, step
        self._data, self._flat = data, keras.tree.flatten(data)
        leaves = [leaf for leaf in self._flat if leaf is not None]
        self._leaves = [
            leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
            for leaf in leaves
        ]
        self.rows = int(self._leaves[0].shape[0])
        self.memory = _Memory()
        self.has_gathered = False
        self.strays: list[StateDifference] = []
        self._kinds = np.zeros(_MOST_NUMBERS, np.int32)
        self._traced: dict[bool, Any] = {}
        self._paths: list[list[str]] = []
        self._sites: list[Site] = []
        halves = {"float16", "bfloat16"}
        layers = private.layers_of(model)
        is_half = any(layer.compute_dtype in halves for layer in layers)
        self._tolerances = _TOLERANCE, _TOLERANCE_OF_NUMBERS
        if is_half:
            self._tolerances = _TOLERANCE_IN_HALF, _TOLERANCE_IN_HALF

    def run_whole(self) -> Run:
        """Run the step on all rows."""
        return self._run(self._leaves, 0, 1.0, None)

    def run_part(self, whole: Run, begin: int, end: int) -> Run:
        """Run the step on some rows, as one of several ranks."""
        leaves = [_slice(leaf, begin, end) for leaf in self._leaves]
        return self._run(leaves, begin, (end - begin) / self.rows, whole.shared)

    def run_repeated(self, times: int) -> Run:
        """Run the step on some rows, each of them `times` times."""
        few = [_slice(leaf, 0, max(1, self.rows // 4)) for leaf in self._leaves]
        many = [_repeat(leaf, times) for leaf in few]
        return self._run(many, 0, float(times), None)

    def set_kinds(self, found: dict[Site, str | None] | None) -> bool:
        """Let the next runs know kinds of numbers; return True if that changes any.

        Args:
            found: Kinds by site; `None` to forget all.
        """
        before = self._kinds.copy()
        if found is None:
            self._kinds[:] = 0
        for site, kind in (found or {}).items():
            if kind == "sum" and site[0] != "compute":
                self._kinds[self.memory.places[site]] = 1
            elif kind == "neither" and site in self.memory.gathered:
                self._kinds[self.memory.places[site]] = 2
        return bool((before != self._kinds).any())

    def is_random(self, whole: Run) -> bool:
        """Return True if the step gives something else if it runs again."""
        again = self.run_whole()
        for first, second in zip(whole.gradients, again.gradients, strict=True):
            kind, _, _ = self.compare(first, [second], [1.0])
            if kind == "neither":
                return True
        return False

    def kind_of(
        self, whole: float, parts: Sequence[float], fractions: Sequence[float]
    ) -> str | None:
        """Return the kind of a number, by its values."""
        mean = sum(p * f for p, f in zip(parts, fractions, strict=True))
        size = max([abs(whole), *(abs(part) for part in parts if np.isfinite(part))])
        tolerance = self._tolerances[1] * size
        return _kind(size, abs(whole - mean), abs(whole - sum(parts)), tolerance)

    def compare_updates(
        self, whole: Run, parts: Sequence[Run], fractions: Sequence[float]
    ) -> tuple[list[tuple[str | None, float | None]], dict[str, float]]:
        """Return kind and difference of each update, and each weight's difference."""
        verdicts: list[tuple[str | None, float | None]] = []
        weights: dict[str, float] = {}
        updates = [run.gradients for run in (whole, *parts)]
        for update, *others in zip(*updates, strict=True):
            kind, difference, of_weights = self.compare(update, others, fractions)
            if kind == "neither" and self.has_gathered:
                kind = "mean"  # `gather_rows`: one rank cannot simulate it
            verdicts.append((kind, difference))
            weights |= of_weights
        return verdicts, weights

    def compare(
        self,
        whole: dict[str, Any],
        parts: Sequence[dict[str, Any]],
        fractions: Sequence[float],
    ) -> tuple[str | None, float, dict[str, float]]:
        """Return the kind of an update's gradients, its difference, and each weight's.

        A weight differs if its gradient does by more than rounding: also one with a
        short gradient beside others with long ones.
        """
        lengths = {path: _length([gradient]) for path, gradient in whole.items()}
        total = _length([np.array(list(lengths.values()))])
        left: list[dict[str, float]] = []
        most: list[float] = []
        for factors in (fractions, [1.0] * len(parts)):
            of_weights = {}
            for path, gradient in whole.items():
                each = [gradient, *(part[path] for part in parts)]
                of_weights[path] = _length([_combine(each, [-1.0, *factors])])
            relative = [
                length * total / (lengths[path] + total / 20)
                for path, length in of_weights.items()
            ]
            everything = _length([np.array(list(of_weights.values()))])
            left.append(of_weights)
            most.append(max(everything, *relative))
        kind = _kind(total, most[0], most[1], self._tolerances[0] * total)
        is_sum = kind == "sum"
        differences = {
            path: length / lengths[path] if lengths[path] else 0.0
            for path, length in left[is_sum].items()
        }
        return kind, most[is_sum] / total if total else 0.0, differences

    @contextlib.contextmanager
    def preserve_seeds(self) -> Iterator[None]:
        """Context manager after which random numbers go on as without the trial."""
        variables = list_variables(self.model)
        with preserve_variables([v for v in variables if _is_seed(v)]):
            yield

    def _run(self, leaves: list[Any], begin: int, fraction: float, shared: Any) -> Run:
        function, variables = self._step_on, _changing_variables(self.model)
        graph = None
        if not self.model.run_eagerly:
            function = self._traced_for(leaves, shared)
            graph = function.graph
            variables += graph.variables
            self.strays = find_stray_variables(self.model, graph)
        with preserve_variables([v for v in variables if not _is_seed(v)]):
            for found in optimizers_of(self.model):
                if isinstance(found, keras.optimizers.LossScaleOptimizer):
                    scale = found.dynamic_scale
                    scale.assign(tf.minimum(scale, _LOSS_SCALE))
            gradients, numbers, shared = function(
                leaves,
                tf.constant(begin),
                tf.constant(fraction, tf.float64),
                tf.constant(self._kinds),
                shared,
            )
            state = {
                id(variable): np.array(keras.ops.convert_to_numpy(variable))
                for variable in list_watched_variables(self.model, graph)
                if not _is_seed(variable)
            }
        named = [
            dict(zip(paths, keras.tree.map_structure(np.array, update), strict=True))
            for paths, update in zip(self._paths, gradients, strict=True)
        ]
        values = dict(zip(self._sites, map(float, numbers), strict=True))
        return Run(named, values, shared, state)

    def _traced_for(self, leaves: list[Any], shared: Any) -> Any:
        """Return the step traced for any number of rows, or else for these."""
        key = shared is None
        if key not in self._traced:
            try:
                self._traced[key] = self._trace(map(_any_rows, leaves), shared)
            except Exception:  # a number of rows may be a constant of the step
                self._traced[key] = None
        if self._traced[key] is None:
            return self._trace(map(tf.type_spec_from_value, leaves), shared)
        return self._traced[key]

    def _trace(self, specs: Iterable[Any], shared: Any) -> Any:
        return tf.function(self._step_on, autograph=False).get_concrete_function(
            list(specs),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float64),
            tf.TensorSpec([_MOST_NUMBERS], tf.int32),
            shared and [tf.TensorSpec(t.shape, t.dtype) for t in shared],
        )

    def _step_on(
        self, leaves: list[Any], begin: Any, fraction: Any, kinds: Any, shared: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        rest = iter(leaves)
        data = [None if n is None else next(rest) for n in self._flat]
        data = keras.tree.pack_sequence_as(self._data, data)
        run = _TrialRun(begin, fraction, kinds, shared, self.memory)
        calls: list[Recorded] = []
        rows = num_rows(data)
        context = StepContext(
            rows=rows,
            length=rows if isinstance(rows, int) else None,
            rows_of_all=tf.cast(rows, tf.float64) / fraction,
            global_rows=self.rows * comm.size(),
            recorded=calls,
            trial=run,
        )
        with step_context.entered(context):
            self._step(data)
        self._sites = list(run.numbers)
        self.has_gathered |= run.has_gathered
        self._paths, updates = [], []
        for call in calls:
            pairs = [
                (_path(variable), _some_elements(gradient))
                for gradient, variable in zip(
                    call.gradients,
                    variables_of(call.optimizer, call.variables),
                    strict=True,
                )
                if gradient is not None
            ]
            self._paths.append([path for path, _ in pairs])
            updates.append([gradient for _, gradient in pairs])
        return updates, list(run.numbers.values()), run.shared


def _merge(found_by_rank: Sequence[Found | str], seconds: float) -> Trial:
    """Return what all ranks found together.

    A rank may have found nothing, as in a batch without a label. What is a mean on one
    rank and a sum on another is neither.
    """
    every = [found for found in found_by_rank if isinstance(found, Found)]
    if not every:
        return Trial(reason=str(found_by_rank[0]), seconds=seconds)
    if len({len(found.verdicts) for found in every}) > 1 or not every[0].verdicts:
        reason = "its step does not make the same updates in each run"
        return Trial(reason=reason, seconds=seconds)

    def join(kinds: Iterable[str | None]) -> str:
        known = {kind for kind in kinds if kind is not None}
        return known.pop() if len(known) == 1 else "neither" if known else "mean"

    verdicts = []
    for of_ranks in zip(*(found.verdicts for found in every), strict=True):
        differences = [d for _, d in of_ranks if d is not None]
        kind = join(kind for kind, _ in of_ranks)
        verdicts.append(Verdict(kind, max(differences, default=None)))
    sites = {site for found in every for site in found.numbers}
    numbers = {site: join(found.numbers.get(site) for found in every) for site in sites}
    sums = {("apply", i) for i, v in enumerate(verdicts) if v.kind == "sum"}
    sums |= {s for s, kind in numbers.items() if kind == "sum" and s[0] != "compute"}
    gatherable = set.intersection(*(found.gatherable for found in every))
    gathered = {site for site in gatherable if numbers.get(site) == "neither"}
    paths = {path for found in every for path in found.weights}
    states = {(s.kind, s.name): s for found in every[::-1] for s in found.states}
    return Trial(
        tuple(verdicts),
        LossKinds(frozenset(sums), frozenset(gathered)),
        weights={p: max(f.weights.get(p, 0.0) for f in every) for p in sorted(paths)},
        states=tuple(states[key] for key in sorted(states)),
        seconds=seconds,
    )


def _kind(size: float, of_mean: float, of_sum: float, tolerance: float) -> str | None:
    """Return the kind of what differs so from the parts' mean and from their sum."""
    if not np.isfinite(size) or not size:
        return None
    if of_mean <= tolerance:
        return "mean"
    return "sum" if of_sum <= tolerance else "neither"


def _kind_of_growth(before: Any, after: Any, least: float) -> str | None:
    """Return the kind of what has grown with the number of rows, or has not."""
    if not (np.isfinite(before) and np.isfinite(after) and before):
        return None
    return "sum" if after > least * before else "mean"


def _some_elements(gradient: Any) -> Any:
    """Return elements of a gradient, evenly spread; of a sparse one all, and where."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient.values, tf.float64), gradient.indices
    flat = tf.reshape(gradient, [-1])
    size = flat.shape[0]
    every = 1 if size is None else -(-size // _MOST_ELEMENTS)
    return tf.cast(flat[::every], tf.float64)


def _combine(gradients: Sequence[Any], factors: Sequence[float]) -> Any:
    """Add up gradients × factors; of sparse ones the rows that any of them has."""
    if not isinstance(gradients[0], tuple):
        return sum(g * f for g, f in zip(gradients, factors, strict=True))
    rows, places = np.unique(
        np.concatenate([indices for _, indices in gradients]), return_inverse=True
    )
    values = [v * f for (v, _), f in zip(gradients, factors, strict=True)]
    result = np.zeros((len(rows), *values[0].shape[1:]))
    np.add.at(result, places, np.concatenate(values))
    return result


def _length(gradients: Iterable[Any]) -> float:
    """Return the length of all gradients together."""
    squares = [np.sum(np.square(_combine([g], [1.0]))) for g in gradients]
    return float(np.sqrt(sum(squares)))


def _slice(leaf: Any, begin: int, end: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        rest = [0] * (leaf.shape.rank - 1)
        size = [end - begin, *leaf.dense_shape.numpy()[1:]]
        return tf.sparse.slice(leaf, [begin, *rest], size)
    return leaf[begin:end]


def _repeat(leaf: Any, times: int) -> Any:
    is_sparse = isinstance(leaf, tf.SparseTensor)
    return (tf.sparse.concat if is_sparse else _concat)(0, [leaf] * times)


def _concat(axis: int, leaves: list[Any]) -> Any:
    return tf.concat(leaves, axis)


def _any_rows(leaf: Any) -> Any:
    """Return the spec of such values with any number of rows."""
    spec = tf.type_spec_from_value(leaf)
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        kind = spec.ragged_rank, spec.row_splits_dtype
        return tf.RaggedTensorSpec(shape, spec.dtype, *kind)
    return type(spec)(shape, spec.dtype)


def _changing_variables(model: Any) -> list[Any]:
    """List the variables that a step may change which applies no gradients."""
    slots = {
        id(v) for o in optimizers_of(model) for v in o.variables if len(v.shape) > 0
    }
    return [v for v in list_variables(model) if id(v) not in slots]


def _is_seed(variable: Any) -> bool:
    """Return True for the state of a generator of Keras, or of TensorFlow."""
    dtype, shape = keras.backend.standardize_dtype(variable.dtype), variable.shape
    return dtype == "int64" and tuple(shape) in ((2,), (3,))


def _path(variable: Any) -> str:
    return getattr(variable, "path", variable.name)


@contextlib.contextmanager
def _without_noise(model: Any) -> Iterator[None]:
    """Context manager in which layers of Keras such as `Dropout` do nothing."""
    with contextlib.ExitStack() as stack:
        for layer in private.layers_of(model):
            for cls, name in _RANDOM:
                if isinstance(layer, cls) and vars(layer).get(name):
                    stack.callback(setattr, layer, name, vars(layer)[name])
                    setattr(layer, name, 0)
        yield


def warn(trial: Trial) -> None:
    """Warn on the first rank of what is not that of one process on N ranks.

    Args:
        trial: What all ranks found.
    """
    warn_of_states(trial.states)
    neither = [v.difference or 0.0 for v in trial.verdicts if v.kind == "neither"]
    if not neither or comm.rank() > 0:
        return
    worst = sorted(trial.weights, key=lambda path: -trial.weights[path])[:3]
    warnings.warn(
        "The train step was tried on two parts of its first batch: the mean of their "
        f"gradients differs from the gradient of the whole by {_percent(max(neither))} "
        f"(most: {', '.join(worst)}), and so does their sum. The ranks average their "
        "gradients as if it were a mean over rows, so that they train another model "
        "than one process. The step adds a mean and a sum "
        "(`keras_dist.sum_over_rows(loss)` marks the sum), divides by a number of its "
        "batch (`keras_dist.weighted_mean(values, weights)`), compares rows with one "
        "another (`keras_dist.gather_rows(z)`), or changes gradients before it applies "
        "them (clip them in the optimizer: `clipnorm=`).",
        stacklevel=2,
    )


def _percent(difference: float | None) -> str:
    return f"{100 * (difference or 0):.2g} %"
