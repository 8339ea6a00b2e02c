"""Try on the first batch whether a train step's gradients are means or sums over rows.

The gradients of the whole batch, as they reach `Optimizer.apply`, are compared with
the gradients of two parts, which are taken for the batches of two ranks. If their mean,
weighted by rows, is the gradient of the whole, N ranks that average their gradients
train the model of one process. If their sum is, gradients are added up instead. If
neither is, there is a warning with the difference in percent.

Numbers that can be multiplied by themselves are tried in the same runs, by their
values: losses of `compile` and of `add_loss`, `Mean` trackers, and what the step logs.
Those that come later are tried after those before them are right (`_LEVELS`).

What is 0 hides its kind, as a loss whose weight begins at 0. So the step is also tried
with other values of scalar variables that are 0; and what was 0 nevertheless is not
seen yet, and tried again on later batches.

In a trial, a part draws its rows of the whole batch's random numbers, as a rank does,
and `BatchNormalization` uses the statistics of the whole batch. A step that draws in
another way counts as a mean.
Afterwards all variables have the values that they had before.
"""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, lines, mixin, private
from keras_dist.data.batch_rows import num_rows
from keras_dist.data.draws import preserve_generators
from keras_dist.errors import summarize
from keras_dist.optimizer import step_context
from keras_dist.optimizer.attach import Recorded
from keras_dist.optimizer.nested import optimizers_of, variables_of
from keras_dist.optimizer.step_context import LossKinds, StepContext, StepPlace
from keras_dist.training.batch_norm import GlobalMoments, explain_unsynchronized
from keras_dist.training.losses import (
    explain_row_mixers,
    split_step,
)
from keras_dist.training.metric_state import preserve_metrics, set_state
from keras_dist.training.metric_state import read_state as read_metric
from keras_dist.training.metrics import stateful_metrics
from keras_dist.training.noise import draw_rows
from keras_dist.training.remember import list_variables, preserve_variables
from keras_dist.training.rows import row_bytes
from keras_dist.training.state_trial import (
    State,
    StateDifference,
    compare_metrics,
    compare_weights,
    describe,
    differs,
    list_untracked_state,
    name_logs,
    read_state,
)

# Why a batch has no parts, as the atoms of molecules and their labels.
UNEVEN = "the parts of the batch differ in length"

# In the reason why a step was not tried: it runs on a batch, and not on a part of it.
ON_PART = "on a part of the batch"

# The kind of gradients that were 0.
NOT_SEEN = "not seen yet"

# In the order in which they depend on one another.
_LEVELS = ("loss", "compute", "tracker", "log")

# Elements of a weight's gradient that are compared, and rows of a sparse one.
_MOST_ELEMENTS, _MOST_SPARSE_ROWS = 2**14, 512

# Gradients, and numbers, are equal if they differ by less, of the whole: rounding.
_TOLERANCE, _TOLERANCE_OF_NUMBERS, _TOLERANCE_IN_HALF = 2e-3, 1e-4, 5e-2

# Values in place of scalars that are 0: weights, and counters, of which a step may use
# the remainder.
_NOT_ZERO, _NOT_ZERO_INTEGER = 1.0, 10_007

# At the start the scale of Keras lets many gradients of float16 overflow.
_LOSS_SCALE = 128.0


@dataclass(frozen=True)
class Trial:
    """What was found of a train step, by one rank or by all ranks together.

    A kind is "mean", "sum" or "neither"; `None` if a rank has only seen zeros, or
    numbers that are not finite.

    Args:
        found: The kind of each loss, of each logged number, and of the gradients of
            each call of `apply`.
        difference: By how much the gradients of the parts differ most from the whole
            batch's, as a fraction of their length.
        gatherable: Losses that can be computed from the rows of all ranks, and the MiB
            that are sent for it in a step.
        weights: For each weight, by how much its gradient differs.
        states: Metrics and other state that the parts do not add up to.
        nonzero: Variables that were 0, and had another value where gradients differed.
        in_blocks: Of `LossKinds`.
        mixers: `losses.explain_row_mixers`: these may not show in each batch.
        reason: Why the step was not tried; "" if it was.
        seconds: How long it took.
    """

    found: dict[StepPlace, str | None] = field(default_factory=dict)
    difference: float = 0.0
    gatherable: dict[StepPlace, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    states: Sequence[StateDifference] = ()
    nonzero: Sequence[str] = ()
    in_blocks: bool = False
    mixers: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def kinds(self) -> LossKinds:
        """What a step has to add up, or to compute from the rows of all ranks."""
        found = self.found
        # What `compute_loss` returns is differentiated at once: "apply" says it all.
        others = "compute", "log"
        sums = {s for s, k in found.items() if k == "sum" and s[0] not in others}
        gathered = {s for s in self.gatherable if found.get(s) == "neither"}
        return LossKinds(frozenset(sums), frozenset(gathered), self.in_blocks)

    @property
    def updates(self) -> list[str | None]:
        """The kinds of the gradients, for each call of `apply`."""
        places = sorted(place for place in self.found if place[0] == "apply")
        return [self.found[place] for place in places]

    @property
    def summed_logs(self) -> set[Any]:
        """The paths of what a step logs as a sum over rows."""
        return {s[1] for s, k in self.found.items() if s[0] == "log" and k == "sum"}

    @property
    def is_unseen(self) -> bool:
        """True if a loss, or gradients, were 0, or not finite: tried in each epoch."""
        return None in {kind for place, kind in self.found.items() if place[0] != "log"}

    @property
    def is_open(self) -> bool:
        """True if another batch may show more."""
        is_hidden = "neither" not in self.updates and bool(self.mixers)
        return bool(self.updates) and (None in self.found.values() or is_hidden)

    def describe_unseen(self) -> str:
        """Say which losses were 0; "" if none were."""
        unseen = [s for s, k in self.found.items() if k is None and s[0] == "loss"]
        return f"{len(unseen)} loss{'es' * (len(unseen) > 1)} of 0" if unseen else ""

    def add(self, other: "Trial") -> "Trial":
        """Return what two trials of one step have found, of other rows or values.

        What is a mean in one and a sum in the other is neither.
        """
        if other.reason or len(other.updates) != len(self.updates):
            return self
        states = {(s.kind, s.name): s for s in (*other.states, *self.states)}
        found, weights = self.found | other.found, self.weights | other.weights
        for place in found:
            kinds = {self.found.get(place), other.found.get(place)} - {None}
            found[place] = "neither" if len(kinds) > 1 else next(iter(kinds), None)
        return replace(
            self,
            found=found,
            difference=max(self.difference, other.difference),
            gatherable={
                place: max(mib, other.gatherable[place])
                for place, mib in self.gatherable.items()
                if place in other.gatherable
            },
            weights={p: max(w, self.weights.get(p, 0.0)) for p, w in weights.items()},
            states=[states[key] for key in sorted(states)],
            nonzero=self.nonzero if "neither" in self.updates else other.nonzero,
            in_blocks=self.in_blocks or other.in_blocks,
        )

    def __str__(self) -> str:
        if self.reason:
            return f"not tried, taken for a mean over rows: {self.reason}"
        names = {None: NOT_SEEN, "neither": "neither mean nor sum"}
        parts = [
            names.get(kind, f"{kind} over rows")
            + f" ({_percent(self.difference)})" * (kind == "neither")
            for kind in self.updates
        ]
        text = "; ".join(parts)
        if unseen := self.describe_unseen():
            text += f", with {unseen}, {NOT_SEEN}"
        if summed := sum(level == "loss" for level, _ in self.kinds.sums):
            text += f", with {summed} summed loss{'es' * (summed > 1)}"
        if gathered := self.kinds.gathered:
            mib = sum(self.gatherable[place] for place in gathered)
            text += f", its rows gathered ({mib:.2g} MiB a step)"
        return f"{text} (found by trying a step, in {self.seconds:.1f} s)"


@dataclass(frozen=True)
class Run:
    """The results of one run of a step.

    Args:
        gradients: For each update, by the weight's path: some elements of its gradient.
        numbers: Values by their place.
        shared: Tensors that the runs of parts need.
        state: Values of metrics and of layers' state afterwards.
    """

    gradients: list[dict[str, np.ndarray]]
    numbers: dict[StepPlace, float]
    shared: list[Any]
    state: State


def try_step(runner: "Runner", data: Any) -> Trial:
    """Try a train step on a batch of this rank; all ranks call this."""
    begin = time.monotonic()
    reason = next(filter(None, comm.gather(explain_untriable(data))), "")
    found = Trial(reason=reason) if reason else try_alone(runner, data)
    found, mixers = _join(comm.gather(found)), explain_row_mixers(runner.model)
    return replace(found, mixers=mixers, seconds=time.monotonic() - begin)


def try_alone(runner: "Runner", data: Any) -> Trial:
    """Try a step on this rank alone; an error is the reason why it was not tried."""
    model = runner.model
    seeds = [v for v in list_variables(model) if _is_seed(v)]
    try:
        with (
            preserve_generators(),
            preserve_variables(seeds),
            _share_moments(model),
            # The ranks may make different numbers of runs.
            comm.without_collectives("the step calls a collective"),
        ):
            return runner.find(data)
    except Exception as error:  # whatever a user's step raises on fewer rows
        return Trial(reason=summarize(error))
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
        return UNEVEN
    return "the batch has one row" if lengths.pop() < 2 else ""


def warn(model: Any, trial: Trial) -> None:
    """Warn on the first rank of what N ranks do not compute as one process does.

    Raises:
        ValueError: On all ranks, if they cannot compute it.
    """
    if errors := [state.name for state in trial.states if state.kind == "error"]:
        raise ValueError(errors[0])
    if comm.rank() > 0:
        return
    if trial.states:
        lines.warn(
            "The first batch was tried as a whole and in two parts, as on two ranks. N "
            "ranks give other values than one process. "
            f"{' '.join(describe(trial.states))}"
        )
    if "neither" not in trial.updates:
        return
    worst = sorted(trial.weights, key=lambda path: -trial.weights[path])[:3]
    names = ", ".join(trial.nonzero)
    lines.warn(
        f"{explain_unsynchronized(model)}"
        f"{trial.mixers}The train step was tried on two parts of a batch"
        f"{f', with {names} not 0' * bool(names)}: the mean of their "
        "gradients differs from the gradient of the whole by "
        f"{_percent(trial.difference)} (most: {', '.join(worst)}), and so does their "
        "sum. The ranks average their gradients as if the loss were a mean over rows, "
        "so they train a different model than one process. The step adds a sum to a "
        "mean (mark the sum: `keras_dist.sum_over_rows(loss)`), divides by a number of "
        "its batch (`keras_dist.weighted_mean(values, weights)`), compares rows with "
        "one another (`keras_dist.gather_rows(z)`), or changes gradients before it "
        "applies them (clip them in the optimizer: `clipnorm=`)."
    )


class TrialRun:
    """One run of a step in its trial: `StepContext.trial`.

    Args:
        begin: The first row of this part.
        fraction: The rows of this part, as a fraction of the whole.
        shared: What the run of the whole shared; `None` in that run.
    """

    def __init__(self, begin: Any, fraction: Any, shared: Any) -> None:
        self._begin, self._fraction = begin, fraction
        self._graph = tf.compat.v1.get_default_graph()
        self._given = None if shared is None else iter(shared)
        self._row_bytes = self._draws = 0
        self.shared: list[Any] = []
        self.numbers: dict[StepPlace, Any] = {}
        self.gatherable: dict[StepPlace, int] = {}  # bytes of a row
        self.has_gathered = self.has_own_draws = self.has_draws = False

    def find_counter(self, *_: Any) -> tuple[int, list[int]] | None:
        """Find a counter for the next draw by `tf.random`: `draw_rows`."""
        if tf.compat.v1.get_default_graph() is not self._graph:  # as in a loop
            self.has_own_draws = True
            return None
        self._draws += 1
        return 1, [self._draws, 0]

    def take_from_whole(self, value: Any) -> Any:
        """Return the value that the run of the whole batch had here."""
        if self._given is None:
            self.shared.append(value)
            return value
        return tf.ensure_shape(next(self._given), value.shape)

    def gather(self, rows: Any, *, is_known: bool = False) -> Any:
        """Return the rows of the whole batch; this run's rows have a gradient.

        Args:
            rows: The rows of this run.
            is_known: Whether a loss is computed from gathered rows alone.
        """
        self.has_gathered |= not is_known
        self._row_bytes += row_bytes(rows)
        if self._given is None:
            self.shared.append(rows)
            return rows
        whole = next(self._given)
        if rows.dtype.is_floating:
            # Gradients are averaged by rows, and this is a part of the whole's.
            factor = tf.cast(1 / self._fraction, rows.dtype)
            rows = rows * factor + tf.stop_gradient(rows - rows * factor)
        end = self._begin + tf.shape(rows)[0]
        return tf.concat([whole[: self._begin], rows, whole[end:]], 0)

    def note(self, place: StepPlace, value: Any) -> None:
        """Remember a number."""
        self.numbers[place] = tf.cast(value, tf.float64)

    def gather_loss(self, place: StepPlace, compute: Callable[[], Any]) -> Any:
        """Compute a loss from gathered rows, and note that it can be."""
        before, value = self._row_bytes, compute()
        if value is not None:
            self.gatherable[place] = self._row_bytes - before
        return value


class Runner:
    """Runs a train step on parts of a batch, and takes back what it does.

    In a graph the step is traced for the whole batch, and for any part of it; for parts
    once more if a number has to be multiplied. Without a graph, variables outside of
    the model and TensorFlow's random numbers could not be put back.

    Args:
        model: The model.
        step: Its own train step.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any]) -> None:
        self.model, self._step, self._data = model, step, None
        self._leaves: list[Any] = []
        self._rows = 0
        self._kinds = LossKinds()
        self._functions: dict[Any, Any] = {}
        self._generator = keras.random.SeedGenerator(0)
        self._is_of_fixed_rows = self._in_blocks = False  # rows; and what they draw
        # Of the last run, or trace:
        self._places: list[StepPlace] = []
        self._gatherable: dict[StepPlace, float] = {}
        self._has_gathered = self._has_own_draws = self._has_draws = False
        self._changed: list[Any] = []
        self._untracked: list[StateDifference] = []
        halves = {"float16", "bfloat16"}
        self._tolerances = _TOLERANCE, _TOLERANCE_OF_NUMBERS
        if any(layer.compute_dtype in halves for layer in private.layers_of(model)):
            self._tolerances = _TOLERANCE_IN_HALF, _TOLERANCE_IN_HALF

    def find(self, data: Any) -> Trial:
        """Try the step on a batch: as it is, and with no scalar variable at 0."""
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        self._data = data
        self._leaves = [
            leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
            for leaf in leaves
        ]
        self._rows = int(self._leaves[0].shape[0])
        found, zeros = self._compare_layouts(), self._list_zeros()
        if zeros:
            with preserve_variables(zeros), contextlib.suppress(Exception):
                for variable in zeros:
                    is_float = variable.dtype.is_floating
                    variable.assign(_NOT_ZERO if is_float else _NOT_ZERO_INTEGER)
                names = [variable.name.partition(":")[0] for variable in zeros]
                others = replace(self._compare_layouts(), states=(), nonzero=names)
                found = found.add(others)
        return found

    def _compare_layouts(self) -> Trial:
        """Compare the whole batch with two parts, whose draws may be in blocks."""
        found = self._compare_parts()
        if "neither" not in found.updates or not self._has_draws:
            return found
        with mixin.change(self, _in_blocks=True):
            others = self._compare_parts()
        return found if "neither" in others.updates else replace(others, in_blocks=True)

    def _compare_parts(self) -> Trial:
        """Compare the whole batch with two parts, which are not equally long."""
        self._kinds = LossKinds(in_blocks=self._in_blocks)
        before = len(stateful_metrics(self.model.metrics))
        whole = self._run(self._leaves)
        if len(stateful_metrics(self.model.metrics)) > before:
            whole = self._run(self._leaves)  # with the metrics that it has made
        if not whole.gradients:
            return Trial()

        def run_parts() -> list[Run]:
            try:
                return [
                    self._run(
                        [_slice(leaf, begin, end) for leaf in self._leaves],
                        begin=begin,
                        fraction=(end - begin) / self._rows,
                        shared=whole.shared,
                    )
                    for begin, end in ((0, cut), (cut, self._rows))
                ]
            except Exception as error:
                raise ValueError(f"{ON_PART}, {summarize(error)}") from error

        def mix(place: StepPlace, parts: list[Run]) -> float:
            pairs = zip(parts, fractions, strict=True)
            return sum(part.numbers[place] * f for part, f in pairs)

        def judge(place: StepPlace, parts: list[Run]) -> str | None:
            value, values = whole.numbers[place], [p.numbers[place] for p in parts]
            size = max(map(abs, [value, *filter(np.isfinite, values)]))
            gaps = abs(value - mix(place, parts)), abs(value - sum(values))
            return _kind(size, *gaps, self._tolerances[1] * size)

        tried = {}
        thirds = (self._rows // 3, 2 * self._rows // 3)
        for cut in dict.fromkeys(max(1, third) for third in thirds):
            tried[cut] = run_parts()
            # A part without a label, and so without a gradient, hides a divisor.
            if all(_has_gradients(whole, part) for part in tried[cut]):
                break
        else:
            cut = min(tried)  # no cut is better than the first
        fractions, parts = [cut / self._rows, 1 - cut / self._rows], tried[cut]
        numbers, parts = self._find_numbers(parts, run_parts, judge)
        updates, difference, weights = self._compare_updates(whole, parts, fractions)
        doubted: dict[StepPlace, str | None] = {
            place: "neither"
            for place in self._gatherable
            if numbers.get(place) == "mean" and "neither" in updates.values()
        }
        # A value may be the mean of the parts' where the gradient is not.
        if self._set_kinds(numbers | doubted):
            parts = run_parts()
            others = self._compare_updates(whole, parts, fractions)
            if others[0] != updates:
                numbers |= doubted
                updates, difference, weights = others
        runs = self.model, whole.state, [part.state for part in parts], fractions
        differing = {
            place[1]: (whole.numbers[place], mix(place, parts))
            for place, kind in numbers.items()
            if kind == "neither" and place[0] == "log"
        }
        states = compare_metrics(*runs) + compare_weights(*runs)
        states += name_logs(self.model, whole.state, differing)
        if (states or "neither" in updates.values()) and self._is_random(whole):
            return Trial(states=self._untracked, reason="its runs are random")
        states += self._untracked
        found = numbers | updates
        return Trial(found, difference, self._gatherable, weights, states)

    def _find_numbers(
        self, runs: Any, run: Callable[[], Any], judge: Callable[[StepPlace, Any], Any]
    ) -> tuple[dict[StepPlace, str | None], Any]:
        """Return the kind of each number, and runs in which they are multiplied."""
        numbers: dict[StepPlace, str | None] = {}
        for level in _LEVELS:
            found = [place for place in self._places if place[0] == level]
            numbers |= {place: judge(place, runs) for place in found}
            if self._set_kinds(numbers):
                runs = run()
        return numbers, runs

    def _set_kinds(self, numbers: dict[StepPlace, str | None]) -> bool:
        """Let the next runs know kinds of numbers; return True if that changes any."""
        before = self._kinds
        found = Trial(numbers, gatherable=self._gatherable, in_blocks=self._in_blocks)
        self._kinds = found.kinds
        return self._kinds != before

    def _is_random(self, whole: Run) -> bool:
        """Return True if a part may draw other numbers than the whole has there."""
        if self._has_own_draws:
            return True
        self._kinds = LossKinds(
            in_blocks=self._in_blocks
        )  # which the whole was traced with
        run = self._run(self._leaves, shared=whole.shared)
        again = self._compare_updates(whole, [run], [1.0])
        return "neither" in again[0].values()

    def _compare_updates(
        self, whole: Run, parts: Sequence[Run], fractions: Sequence[float]
    ) -> tuple[dict[StepPlace, str | None], float, dict[str, float]]:
        """Return the kind of each update, the largest difference, and each weight's."""
        found: dict[StepPlace, str | None] = {}
        most, weights = 0.0, dict[str, float]()
        updates = [run.gradients for run in (whole, *parts)]
        for index, (update, *others) in enumerate(zip(*updates, strict=True)):
            kind, difference, by_weight = self._compare(update, others, fractions)
            if kind == "neither" and self._has_gathered:
                kind, difference = "mean", 0.0  # one rank cannot simulate `gather_rows`
            found["apply", index] = kind
            most, weights = max(most, difference), weights | by_weight
        return found, most, weights

    def _compare(
        self,
        whole: dict[str, np.ndarray],
        parts: Sequence[dict[str, np.ndarray]],
        fractions: Sequence[float],
    ) -> tuple[str | None, float, dict[str, float]]:
        """Return the kind of an update's gradients, its difference, and each weight's.

        A weight differs if its gradient does by more than rounding: also one with a
        short gradient beside others with long ones.
        """
        lengths = {path: _norm([gradient]) for path, gradient in whole.items()}
        total = math.hypot(*lengths.values())
        if not total or not math.isfinite(total):
            return None, 0.0, {}

        def measure(factors: Sequence[float]) -> tuple[dict[str, float], float]:
            left = {}
            for path, gradient in whole.items():
                pairs = zip(parts, factors, strict=True)
                left[path] = _norm([gradient - sum(p[path] * f for p, f in pairs)])
            relative = [
                length * total / (lengths[path] + total / 20)
                for path, length in left.items()
            ]
            return left, max(math.hypot(*left.values()), *relative)

        mean, added = measure(fractions), measure([1.0] * len(parts))
        tolerance = self._tolerances[0] * total
        kind = _kind(total, mean[1], added[1], tolerance)
        left, most = added if kind == "sum" else mean
        weights = {
            p: left[p] / length if length else 0.0 for p, length in lengths.items()
        }
        return kind, most / total, weights

    def _run(
        self,
        leaves: list[Any],
        *,
        begin: int = 0,
        fraction: float = 1.0,
        shared: list[Any] | None = None,
    ) -> Run:
        """Run the step on rows; put back all but `tf.random.Generator`s."""
        function, others = self._step_on, []
        if not self.model.run_eagerly:
            function = self._trace_for(leaves, shared)
            kept = {id(variable.value) for variable in list_variables(self.model)}
            # What the model does not keep.
            others = [v for v in function.graph.variables if id(v) not in kept]
        variables = [*list_variables(self.model), *others, self._generator.state]
        metrics = stateful_metrics(self.model.metrics)
        with (
            preserve_variables(
                [v for v in variables if not _is_seed(v, lengths=[3])]
            ) as before,
            preserve_metrics(metrics),
        ):
            for metric in metrics:
                set_state(metric, read_metric(metric))  # a copy
            for found in optimizers_of(self.model):
                if isinstance(found, keras.optimizers.LossScaleOptimizer):
                    scale = found.dynamic_scale
                    scale.assign(tf.minimum(scale, _LOSS_SCALE))
            gradients, numbers, shared = function(
                leaves, tf.constant(begin), tf.constant(fraction, tf.float64), shared
            )
            state = read_state(self.model)
            outside, is_eager = set(map(id, others)), self.model.run_eagerly
            asked = [pair for pair in before if is_eager or id(pair[0]) in outside]
            changed = [v for v, old in asked if differs(v, old)]
            self._changed = [v for v in changed if not _is_seed(v)]
            self._untracked = list_untracked_state(
                self.model, () if is_eager else self._changed
            )
        self._places = list(numbers)
        gradients = keras.tree.map_structure(np.array, gradients)
        return Run(gradients, {s: float(n) for s, n in numbers.items()}, shared, state)

    def _list_zeros(self) -> list[Any]:
        """List the scalars that the step reads, and that are 0, but for metrics."""
        read = {id(v): v for f in self._functions.values() for v in f.graph.variables}
        ignored = list(self.model.metrics_variables)
        if not read:  # without a graph, and perhaps it only counts
            read = {id(v.value): v.value for v in self.model.variables}
            ignored += self._changed
        for variable in ignored:
            read.pop(id(variable.value), None)
        return [
            v
            for v in read.values()
            if v.shape.rank == 0
            and (v.dtype.is_floating or v.dtype.is_integer)
            and not v.numpy()
        ]

    def _trace_for(self, leaves: list[Any], shared: Any) -> Any:
        """Return the step traced for any number of rows, or else for these."""
        if not self._is_of_fixed_rows:
            try:
                return self._trace(map(_any_rows, leaves), shared)
            except Exception:  # a number of rows may be a constant of the step
                self._is_of_fixed_rows = True
        return self._trace(map(tf.type_spec_from_value, leaves), shared)

    def _trace(self, specs: Iterable[Any], shared: Any) -> Any:
        specs = list(specs)
        key = shared is None, self._kinds, tuple(specs)
        if key not in self._functions:
            step = tf.function(self._step_on, autograph=False)
            self._functions[key] = step.get_concrete_function(
                specs,
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([], tf.float64),
                shared and [tf.TensorSpec(t.shape, t.dtype) for t in shared],
            )
        return self._functions[key]

    def _step_on(
        self, leaves: list[Any], begin: Any, fraction: Any, shared: Any
    ) -> tuple[list[dict[str, Any]], dict[StepPlace, Any], list[Any]]:
        rest = iter(leaves)
        data = keras.tree.map_structure(
            lambda leaf: None if leaf is None else next(rest), self._data
        )
        calls: list[Recorded] = []
        rows, global_rows = num_rows(data), self._rows * comm.size()
        run = TrialRun(begin, fraction, shared)
        context = StepContext(
            rows=rows,
            length=rows,
            begin=begin,
            rows_of_all=tf.round(tf.cast(rows, tf.float64) / fraction),
            global_rows=global_rows,
            recorded=calls,
            trial=run,
        )
        with (
            step_context.enter(context),
            step_context.run_inline(),
            draw_rows(self._generator, lambda seed: seed, run.find_counter),
        ):
            split_step(self.model, self._step, self._kinds)(data)
        self._has_gathered = run.has_gathered
        self._has_own_draws |= run.has_own_draws
        self._has_draws |= run.has_draws
        self._gatherable = {
            place: found * global_rows / 2**20
            for place, found in run.gatherable.items()
        }
        updates = []
        for call in calls:
            variables = variables_of(call.optimizer, call.variables)
            pairs = zip(call.gradients, variables, strict=True)
            updates.append(
                {
                    getattr(variable, "path", variable.name): _some_elements(gradient)
                    for gradient, variable in pairs
                    if gradient is not None
                }
            )
        return updates, run.numbers, run.shared


def _join(trials: Sequence[Trial]) -> Trial:
    """Return what all ranks found together.

    A rank may have found nothing, as in a batch without a label. Then the others may be
    wrong, if each of their rows has one: such a loss is computed from the rows of all
    ranks.
    """
    every = [trial for trial in trials if not trial.reason]
    if not every:
        return trials[0]
    if len({len(trial.updates) for trial in every}) > 1 or not every[0].updates:
        return Trial(reason="its step does not make the same updates in each run")
    joined = functools.reduce(Trial.add, every)
    for place in joined.gatherable:
        if len({trial.found.get(place) is None for trial in every}) > 1:
            joined.found[place] = "neither"
    return joined


def _kind(size: float, of_mean: float, of_sum: float, tolerance: float) -> str | None:
    """Return the kind of what differs so from the parts' mean and from their sum."""
    if not np.isfinite(size) or not size:
        return None
    if of_mean <= tolerance:
        return "mean"
    return "sum" if of_sum <= tolerance else "neither"


def _has_gradients(whole: Run, part: Run) -> bool:
    """Return True if a part has each gradient, and loss, that the whole has."""
    pairs = zip(whole.gradients, part.gradients, strict=True)
    found = [(_norm([one[p]]), _norm([own[p]])) for one, own in pairs for p in one]
    levels = "loss", "compute"
    places = [place for place in whole.numbers if place[0] in levels]
    found += [(whole.numbers[place], part.numbers[place]) for place in places]
    return all(own and np.isfinite(own) for one, own in found if one)


def _some_elements(gradient: Any) -> Any:
    """Return elements of a gradient, evenly spread; of a sparse one, sums of rows."""
    if isinstance(gradient, tf.IndexedSlices):
        rows, buckets = _MOST_SPARSE_ROWS, gradient.indices % _MOST_SPARSE_ROWS
        gradient = tf.math.unsorted_segment_sum(gradient.values, buckets, rows)
    flat = tf.reshape(gradient, [-1])
    size = flat.shape[0]
    every = 1 if size is None else -(-size // _MOST_ELEMENTS)
    return tf.cast(flat[::every], tf.float64)


def _norm(gradients: Iterable[np.ndarray]) -> float:
    """Return the length of all gradients together."""
    return math.hypot(*(float(np.linalg.norm(gradient)) for gradient in gradients))


def _slice(leaf: Any, begin: int, end: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        rest = [0] * (leaf.shape.rank - 1)
        size = [end - begin, *leaf.dense_shape.numpy()[1:]]
        return tf.sparse.slice(leaf, [begin, *rest], size)
    return leaf[begin:end]


def _any_rows(leaf: Any) -> Any:
    """Return the spec of such values with any number of rows."""
    spec = tf.type_spec_from_value(leaf)
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        kind = spec.ragged_rank, spec.row_splits_dtype
        return tf.RaggedTensorSpec(shape, spec.dtype, *kind)
    return type(spec)(shape, spec.dtype)


def _is_seed(variable: Any, *, lengths: Sequence[int] = (2, 3)) -> bool:
    """Return True for the state of a generator of Keras (2), or of TensorFlow (3)."""
    dtype, shape = keras.backend.standardize_dtype(variable.dtype), variable.shape
    return dtype == "int64" and tuple(shape) in [(length,) for length in lengths]


@contextlib.contextmanager
def _share_moments(model: Any) -> Iterator[None]:
    """Context manager in which `BatchNormalization` has the whole batch's moments."""
    with contextlib.ExitStack() as stack:
        for layer in private.layers_of(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                stack.enter_context(mixin.use(layer, GlobalMoments))
        yield


def _percent(difference: float) -> str:
    return f"{100 * difference:.2g} %"
