"""What a model that trains on many ranks remembers: `Session` and `TracedFunctions`.

And `FitDecisions`, which `dist_fit` has made for one fit.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.data.batch_rows import BatchRows, take_off
from keras_dist.data.feed import Feed, raise_own_errors
from keras_dist.optimizer import step_context
from keras_dist.optimizer.step_context import Requests
from keras_dist.training.metric_state import MetricState, read_state, record_starts
from keras_dist.training.metrics import UpdateCounts, list_own_metrics
from keras_dist.training.noise import StepNoise
from keras_dist.training.trial import Runner, Trial
from keras_dist.training.turns import TurnDraws


def _counter(value: Any) -> tf.Variable:
    # Made outside of any graph. Keras does not track it, or it would be saved.
    with tf.init_scope():
        return tf.Variable(value, trainable=False, dtype=tf.int64)


class TracedFunctions:
    """What a model keeps from one fit to the next: traced functions, and their state.

    Keras traces a function again after `compile` alone. Ours are kept beside the plain
    model's functions, which average nothing. A train function is used again in a fit in
    which everything that is part of the graph is equal: `options`.

    Attributes:
        options: Of the fit in which the train function was traced; `None` if unknown.
        is_split: Whether steps run in two functions that XLA compiles, with an
            allreduce between them.
        rows_trained: Rows that this rank has trained on in this epoch.
        rows_seen: Since the metrics were reset: batches, rows, rows of the last batch.
        trial: What the trial of the step found, since the model was compiled; `None`
            if it has to be tried.
        runner: What tries it, if that has to be tried again.
        global_rows: Rows of all ranks in the first step that was traced.
        steps: The steps of this fit.
        requests: What this rank requests of all, and what all have agreed on.
        noise: What steps draw without a seed, on several ranks.
        starts: The states in which metrics of the user's have begun, by their id.
        draws: What a batch of an evaluation, or a prediction, draws: see `TurnDraws`.
    """

    def __init__(self) -> None:
        self.options: Any = None
        self.is_split = False
        self.trial: Trial | None = None
        self.runner: Runner | None = None
        self.global_rows: int | None = None
        self.rows_trained, self.rows_seen = _counter(0), _counter([0, 0, 0])
        self.steps = _counter(0)
        self.requests, self.noise = Requests(), StepNoise()
        self.starts: dict[int, MetricState] = {}
        self.draws: dict[str, dict[int, int]] = {}
        self._compiled: tuple[Any, ...] = ()
        self._functions: tuple[Any, Any] = (None, None)  # of training and evaluation
        self._plain: tuple[Any, Any] = (None, None)

    def enter(self, model: Any) -> None:
        """Give a model that becomes distributed its test function of the last fit."""
        compiled = _list_compiled(model)
        if not _is_same(self._compiled, compiled):
            self._functions = (None, None)
        if self._compiled != compiled:
            self.use_trial(None)
        self._compiled = compiled
        self._plain = model.train_function, model.test_function
        model.train_function, model.test_function = None, self._functions[1]
        self.requests.reset()
        self.requests.is_alone = True
        for counter in (self.rows_trained, self.rows_seen, self.steps):
            counter.assign(tf.zeros_like(counter))

    @contextlib.contextmanager
    def record_reset(self, model: Any) -> Iterator[None]:
        """Context manager in which the metrics of `model` are reset, or are new."""
        before = {id(m): read_state(m) for m in list_own_metrics(model)}
        yield
        self.starts = record_starts(list_own_metrics(model), self.starts, before)

    def split(self, is_split: bool) -> None:
        """Set whether XLA compiles parts of a step."""
        self.is_split = is_split

    def use_trial(
        self,
        trial: Trial | None,
        global_rows: int | None = None,
        runner: Runner | None = None,
    ) -> None:
        """Set what the steps are traced with; `None` if they have to be tried."""
        self.trial, self.global_rows = trial, global_rows
        self.runner = runner if trial is not None and trial.is_open else None
        if trial is None:
            self.draws.clear()
            self.noise.forget_places()

    def draw_in_turn(self, model: Any, name: str) -> TurnDraws:
        """Begin an evaluation ("test"), or a prediction ("predict"), of all ranks."""
        return TurnDraws(model, self.noise, self.draws, name)

    def is_reused(self, model: Any) -> bool:
        """Return True if `model` trains by the train function of the last fit."""
        function = self._functions[0]
        return function is not None and model.train_function is function

    def find_train_function(self, options: Any) -> Any:
        """Return the train function of the last fit, if it was one with `options`."""
        return self._functions[0] if self.options == options else None

    def leave(self, model: Any, options: Any) -> None:
        """Keep the functions, with their `options`, and give the model back its own."""
        traced = model.train_function, model.test_function
        is_same = _is_same(self._compiled, _list_compiled(model))
        if traced[0] is None:  # an evaluation
            traced = self._functions[0], traced[1]
        else:
            self.options = options
        self._functions = traced if is_same else (None, None)
        plain = self._plain if is_same else (None, None)
        model.train_function, model.test_function = plain
        self._plain = (None, None)


def _list_compiled(model: Any) -> tuple[Any, ...]:
    """List what `compile` makes, and options for which Keras traces again."""
    made = private.compiled_parts(model)
    return *made, model.run_eagerly, model.jit_compile, model.steps_per_execution


def _is_same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if len(before) != len(now) or all(found is None for found in now[:2]):
        return False
    pairs = zip(before, now, strict=True)
    return all(old is new or old == new for old, new in pairs)


# The data of an evaluation of a callback, which may run on one rank only. All ranks run
# the others, with results over all rows.
LOCAL_EVALUATION = Feed(data=None)


@dataclass(frozen=True)
class FitDecisions:
    """What was decided for a fit, or with the defaults what a single callback opens.

    Args:
        feed: The training data.
        validation: The data on which Keras's loop evaluates, if there is any.
        factor: Full factor on the learning rate.
        warmup_steps: Steps until the full factor is reached.
        step_multiplier: Schedules of the learning rate are read at step × this number.
        attaches: Whether the fit lets the optimizers average.
        batch_norm: Which rows `BatchNormalization` layers normalize by: "global" or
            "rank".
        is_verbose: Whether the fit prints what it does.
    """

    feed: Feed = Feed(data=None)
    validation: Feed | None = None
    factor: float = 1.0
    warmup_steps: int = 0
    step_multiplier: int = 1
    attaches: bool = False
    batch_norm: str = "rank"
    is_verbose: bool = False

    @property
    def rates(self) -> tuple[float, int, int]:
        """What `scale_rate` takes."""
        return self.factor, self.warmup_steps, self.step_multiplier


@dataclass
class Session:
    """What a model that trains on many ranks remembers, until its fit is over.

    Inside of a step, metrics are this rank's own. At the end of an epoch, and of an
    evaluation on all ranks, their state is summed over all ranks, which is a
    collective.

    Args:
        traced: What the next fit may use again.
        decided: What was decided for this fit.
        options: What is part of the graph of a step beside what is compiled; `None` if
            the next fit must not use the train function.
        outer: The session of the fit around this one, in a callback of which it is.
        hooks: The `FitHooks`: what runs around Keras's loop, and before the first step,
            when all variables exist and none has changed.
        has_started: Whether everything is built and copied in this fit.
        has_run: Whether the model's own train step has begun in this fit.
        calls: How often the train function was called in this fit.
        first_call: The first of these in this epoch.
        sums_metrics: Whether the state of metrics is summed over all ranks.
        evaluation: The data of the evaluation that is running; `None` in a training.
        turn: What its batches draw, if all ranks run it.
        rows_restored: Rows of this epoch that the process before a resume trained on.
        undo: What undoes all changes to the model and its optimizers.
    """

    traced: TracedFunctions
    decided: FitDecisions = FitDecisions()
    options: Any = None
    outer: "Session | None" = None
    hooks: Any = None
    has_started: bool = False
    has_run: bool = False
    calls: int = 0
    first_call: int = 1
    sums_metrics: bool = False
    evaluation: Feed | None = None
    turn: TurnDraws | None = None
    rows_restored: int = 0
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def feeds(self) -> list[Feed]:
        """The data that may hold an error which the user's data raised."""
        found = self.decided.feed, self.decided.validation, self.evaluation
        return [feed for feed in found if feed is not None]

    def begin_epoch(self, epoch: int) -> None:
        """Let the data begin an epoch."""
        self.first_call = self.calls + 1
        if self.decided.feed.epoch is not None:
            self.decided.feed.epoch.assign(epoch)

    @property
    def may_read_on(self) -> bool:
        """True if Keras may begin a step more, and see then that there is no batch.

        It does where it does not know the number of batches. One process knows it of
        data that is divided into steps here; but for an epoch that is resumed, in one
        process, too.
        """
        feed = self.decided.feed
        is_known = feed.plan.steps_before is not None and comm.size() > 1
        return feed.epoch is not None or is_known

    def split_data(self, data: Any) -> tuple[Any, BatchRows]:
        """Split what a train step is given into the batch and its rows.

        The batch has the weights of its classes.
        """
        batch, rows = take_off(data)
        return self.decided.feed.add_class_weights(batch), rows

    def see_rows(self, rows: Any) -> None:
        """Count a batch that the metrics are updated with; in a graph or not."""
        rows = tf.cast(rows, tf.int64)
        steps, so_far, _ = tf.unstack(self.traced.rows_seen.read_value())
        self.traced.rows_seen.assign(tf.stack([steps + 1, so_far + rows, rows]))

    def update_counts(self) -> UpdateCounts:
        """Return what the metrics have seen, in the form that the other ranks get."""
        steps, rows, last_rows = self.traced.rows_seen.numpy().tolist()
        # All of its batches may have been copies.
        return UpdateCounts(rows, steps, last_rows, rows > 0 or not steps)

    def may_try_again(self) -> bool:
        """Return True if the step has to be tried on the next batch; on all ranks.

        The first batch of an epoch may have zeros where a later one has none. If all
        batches have them, no try ends the search: so tries become rare.
        """
        trial, calls = self.traced.trial, self.calls
        if trial is None or not trial.is_open:
            return False
        is_first = trial.is_unseen and calls == self.first_call
        return is_first or not calls & (calls - 1)

    def reset_rows_trained(self) -> None:
        """Count from 0 again: an epoch begins."""
        self.traced.rows_trained.assign(0)
        self.rows_restored = 0

    def restore_rows(self, trained: int, seen: list[int]) -> None:
        """Continue in the middle of an epoch of the process before a resume."""
        self.rows_restored = trained
        self.traced.rows_trained.assign_add(trained)
        self.traced.rows_seen.assign(seen)

    @property
    def rows_trained(self) -> int:
        """Rows of this epoch, with restored ones; this waits for the last step."""
        return int(self.traced.rows_trained.numpy())

    def runs_on_all(self) -> bool:
        """Return True if a result that is read now is one over all ranks."""
        if step_context.is_inside() or not self.sums_metrics:
            return False
        return self.evaluation is not LOCAL_EVALUATION

    @contextlib.contextmanager
    def evaluate(self, model: Any, feed: Feed | None, **state: Any) -> Iterator[None]:
        """Context manager in which Keras's loop evaluates a model on `feed`."""
        with mixin.change(self, evaluation=feed, turn=None, **state):
            if not self.runs_on_all():
                yield
                return
            with self.raise_on_all():
                if comm.size() > 1:
                    self.traced.noise.prepare(model, self.undo)
                    self.turn = self.traced.draw_in_turn(model, "test")
                yield
                if self.turn is not None:
                    self.turn.finish(has_rows=self.update_counts().has_rows)

    @contextlib.contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Context manager whose error, or that of its data, is raised on all ranks."""
        with comm.raise_on_all(), raise_own_errors(self.feeds):
            yield


def traced_functions_of(model: Any) -> TracedFunctions:
    """Return what a model keeps, which is new before its first fit."""
    traced = vars(model).get("_traced_functions") or TracedFunctions()
    # Keras does not track attributes that are set so; it would save them.
    object.__setattr__(model, "_traced_functions", traced)
    return traced


def session_of(model: Any) -> Session:
    """Return the session of a model that trains on many ranks (`install`)."""
    return model._distributed_session
