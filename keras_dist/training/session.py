"""The state of a model that trains on many ranks, during one fit."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from keras_dist import comm, private
from keras_dist.data import Feed, own_error
from keras_dist.errors import is_known
from keras_dist.optimizer import StopRequest, step_context
from keras_dist.optimizer.step_context import own_variable
from keras_dist.training.build import FirstStep
from keras_dist.training.loss_kind import EagerLog
from keras_dist.training.metrics import UpdateCounts
from keras_dist.training.noise import OwnNoise


class RowsTrained:
    """Counts the rows that this rank has trained on in this epoch.

    They are the weights of averaged statistics, and `Throughput` divides them by the
    time.
    """

    def __init__(self) -> None:
        self._count = _counter(0)
        self._restored = 0

    def begin_epoch(self) -> None:
        """Count from 0 again."""
        self._count.assign(0)
        self._restored = 0

    def add(self, rows: Any) -> None:
        """Add the rows of a train step; in a graph or not."""
        self._count.assign_add(tf.cast(rows, tf.int64))

    def restore(self, rows: int) -> None:
        """Add rows of this epoch that the process before a resume has trained on."""
        self._restored = rows
        self._count.assign_add(rows)

    def as_tensor(self) -> Any:
        """Rows of this epoch, including restored ones."""
        return self._count.read_value()

    def total(self) -> int:
        """Return it as a number; this waits for the last step."""
        return int(self._count.numpy())

    def of_this_process(self) -> int:
        """Rows of this epoch without restored ones."""
        return self.total() - self._restored


class RowsSeen:
    """Counts the batches and rows that the metrics have seen since they were reset.

    It is reused by the next fit if that reuses the traced test function, which adds to
    this object's variable.
    """

    def __init__(self) -> None:
        self._counts = _counter([0, 0, 0])

    def reset(self) -> None:
        """Count from 0 again: the metrics were reset."""
        self._counts.assign([0, 0, 0])

    def add(self, rows: Any) -> None:
        """Add a batch of `rows` rows; in a graph or not."""
        rows = tf.cast(rows, tf.int64)
        steps, so_far, _ = tf.unstack(self._counts.read_value())
        self._counts.assign(tf.stack([steps + 1, so_far + rows, rows]))

    def restore(self, counts: list[int]) -> None:
        """Continue from the result of `counts` of another process."""
        self._counts.assign(counts)

    def counts(self) -> list[int]:
        """Batches, rows, and rows of the last batch."""
        return self._counts.numpy().tolist()

    def seen(self, *, has_rows: bool) -> UpdateCounts:
        """Return the counts in the form in which they are sent to the other ranks.

        Args:
            has_rows: `False` if this rank evaluated a row of another rank.
        """
        steps, rows, last_rows = self.counts()
        # All of its batches may have been copies.
        has_rows = has_rows and (rows > 0 or not steps)
        return UpdateCounts(rows, steps, last_rows, has_rows)


def split_mark(data: Any) -> tuple[Any, Any]:
    """Split a marked batch into the batch, and whether it is this rank's: a tensor."""
    batch, mark = data
    return batch, tf.cast(tf.reshape(mark, []), tf.bool)


def _counter(value: Any) -> tf.Variable:
    # Made outside of any graph. Keras does not track it, or it would be saved.
    with tf.init_scope():
        return own_variable(value, dtype=tf.int64)


class TracedFunctions:
    """What a model keeps from one fit to the next: traced functions, and their state.

    Keras traces a function again after `compile` alone. Ours are kept beside those of
    the plain model, which average nothing. A train function is used again in a fit in
    which everything that is part of the graph is equal: `options`.

    Attributes:
        options: Of the fit in which the train function was traced; `None`: unknown.
        is_split: Whether steps run in two functions that XLA compiles, with an
            allreduce between them.
        rows_trained, rows_seen, stop_request: See `Session`; they are in the graphs.
        position: Where the next step begins: rows of the pass before it, rows of the
            whole pass, and rows of all ranks in a step.
        noise: What steps draw without a seed, on several ranks.
    """

    def __init__(self) -> None:
        self.options: Any = None
        self.is_split = False
        self.rows_trained, self.rows_seen = RowsTrained(), RowsSeen()
        self.stop_request, self.noise = StopRequest(), OwnNoise()
        self.position = _counter([0, 0, 0])
        self._compiled: tuple[Any, ...] = ()
        self._functions: tuple[Any, Any] = (None, None)  # of training and evaluation
        self._plain: tuple[Any, Any] = (None, None)

    def enter(self, model: Any) -> None:
        """Give a model that becomes distributed its test function of the last fit."""
        if not _is_same(self._compiled, _compiled(model)):
            self._functions = (None, None)
        self._compiled = _compiled(model)
        self._plain = model.train_function, model.test_function
        model.train_function, model.test_function = None, self._functions[1]
        self.rows_trained.begin_epoch()
        self.stop_request.reset()
        self.position.assign([0, 0, 0])

    def split(self, is_split: bool) -> None:
        """Set whether XLA compiles parts of a step."""
        self.is_split = is_split

    def train_function(self, options: Any) -> Any:
        """Return the train function of the last fit, if it was one with `options`."""
        return self._functions[0] if self.options == options else None

    def leave(self, model: Any, options: Any) -> None:
        """Keep the functions, and give the plain model back its own.

        Args:
            model: The model, which is plain now.
            options: Of this fit; `None` if the train function must not be used again.
        """
        traced = model.train_function, model.test_function
        is_same = _is_same(self._compiled, _compiled(model))
        if traced[0] is None:  # an evaluation
            traced = self._functions[0], traced[1]
        else:
            self.options = options
        self._functions = traced if is_same else (None, None)
        plain = self._plain if is_same else (None, None)
        model.train_function, model.test_function = plain
        self._plain = (None, None)


def _compiled(model: Any) -> tuple[Any, ...]:
    """List what `compile` makes, and options for which Keras traces again."""
    made = private.compiled_parts(model)
    return *made, model.run_eagerly, model.jit_compile, model.steps_per_execution


def _is_same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if len(before) != len(now) or all(found is None for found in now[:2]):
        return False
    pairs = zip(before, now, strict=True)
    return all(old is new or old == new for old, new in pairs)


@dataclass(frozen=True)
class EvaluatedData:
    """Facts about the data of evaluations.

    Args:
        has_rows: `False` if this rank evaluates a row of another rank, since it has
            none.
        feeds: The feeds of the data, which hold errors that the user's data raised.
        is_marked: Whether each of its batches comes with a mark.
    """

    has_rows: bool = True
    feeds: tuple[Feed, ...] = ()
    is_marked: bool = False

    @classmethod
    def of(cls, validation: Feed | None, *others: Feed) -> "EvaluatedData":
        """Return the facts about a validation feed, and hold the errors of others."""
        if validation is None:
            return cls(feeds=others)
        part = validation.adapter
        return cls(part.has_rows, (*others, validation), part.is_marked)

    def own_error(self, error: Exception) -> Exception:
        """Return the user's error, if TensorFlow raised `error` because of it."""
        return own_error(self.feeds, error)


class MetricScope:
    """Whether a metric's result is over all ranks, and whether other ranks wait for it.

    Inside of a step, metrics are this rank's own. At the end of an epoch, and of an
    evaluation on all ranks, the metrics' state is summed over all ranks, which is a
    collective. `is_of_all` tells the two cases apart. A fit goes through these states:

    - *steps*: `is_opening` is false, and no evaluation is running;
    - *opening*: the results of the training were taken. Keras opens the validation
      data, and ranks that have opened it wait for the others;
    - *evaluation*: inside of `evaluation`, until its result is taken.
    """

    def __init__(self) -> None:
        self._averages = False
        self._is_opening = False
        # Whether the running evaluation is one of all ranks; `None` if none runs.
        self._is_common: bool | None = None
        self._has_result = False
        self._is_collective = False
        self._data = EvaluatedData()

    def average(self) -> None:
        """From now on, sum the state of metrics over all ranks."""
        self._averages = True

    def use(self, data: EvaluatedData) -> None:
        """Set the validation data of this fit."""
        self._data = data

    @property
    def data(self) -> EvaluatedData:
        """The data of the running evaluation, or the validation data of this fit."""
        return self._data

    def is_of_all(self) -> bool:
        """Tell whether a result that is read now is one over all ranks."""
        if step_context.is_inside() or not self._averages:
            return False
        return self._is_common is not False

    @property
    def is_evaluating(self) -> bool:
        """True if an evaluation is running."""
        return self._is_common is not None

    def without_mark(self, data: Any) -> tuple[Any, Any]:
        """Split off the mark of a batch that is evaluated; `None` if it has none."""
        is_marked = self._is_common and self._data.is_marked
        return split_mark(data) if is_marked else (data, None)

    def is_waited_for(self) -> bool:
        """Tell whether the other ranks wait for the result of this evaluation."""
        return self.is_of_all() and not self._has_result

    def is_opening(self) -> bool:
        """Tell whether others wait for this rank to open the validation data."""
        return self._is_opening

    def has_rows(self) -> bool:
        """Return False if this rank evaluates a copy of another rank's row."""
        return self._data.has_rows or self._is_common is None

    def end_steps(self) -> None:
        """Note that Keras's loop has its result over all ranks.

        A callback may take one at any batch; more steps come then.
        """
        self._has_result = True
        self._is_opening = self._is_common is None

    def end_opening(self) -> None:
        """Note that the validation data is open, or that there is none."""
        self._is_opening = False

    @contextlib.contextmanager
    def evaluation(self, *, is_of_loop: bool) -> Iterator[None]:
        """Inside the block, an evaluation runs.

        Args:
            is_of_loop: Whether the loop of `Model.fit` calls it, on all ranks. A
                callback that calls `evaluate` may do so on one rank only, so its
                result is that rank's.
        """
        before = self._is_common, self._has_result
        is_of_all = is_of_loop or (self._is_collective and before[0] is None)
        self._is_common, self._has_result = is_of_all, False
        self._is_opening = False
        try:
            yield
        finally:
            self._is_common, self._has_result = before

    @contextlib.contextmanager
    def collective_evaluation(self, data: EvaluatedData) -> Iterator[None]:
        """Inside the block, the next evaluation runs on all ranks, and reads `data`."""
        before = (
            self._averages,
            self._is_collective,
            self._is_common,
            self._data,
        )
        self._averages = self._is_collective = True
        self._is_common, self._data = None, data
        try:
            yield
        finally:
            (
                self._averages,
                self._is_collective,
                self._is_common,
                self._data,
            ) = before

    @contextlib.contextmanager
    def on_this_rank(self) -> Iterator[None]:
        """Inside the block, an evaluation is of this rank only, without collectives."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before


@contextlib.contextmanager
def raising_on_all(
    own_error: Callable[[Exception], Exception], is_waited_for: Callable[[], bool]
) -> Iterator[Any]:
    """Inside the block, an error on this rank is also raised on ranks that wait for it.

    Args:
        own_error: Returns the error of the user's data that is behind an error.
        is_waited_for: Whether the other ranks come next to the end of a block of
            `comm.together`; called after an error.
    """
    try:
        yield
    except Exception as error:
        if comm.size() > 1 and is_waited_for() and not is_known(error):
            with comm.together():
                raise own_error(error)  # noqa: B904 - as it was
        raise


@dataclass
class Session:
    """What a model that trains on many ranks remembers, until its fit is over.

    Args:
        traced: What the next fit may use again.
        options: What is part of the graph of a step beside what is compiled; `None` if
            the next fit must not use the train function.
        is_traced: Whether this fit uses the train function of the last one.
        first_step: Builds the model, then calls hooks.
        metrics: Whether a metric's result is one over all ranks.
        eager_log: Which losses of a step that runs eagerly are sums over rows.
        feed: The training data.
        rates: The learning rates of the epoch's last updates, by a name for the logs,
            before callbacks such as `ReduceLROnPlateau` set those of the next epoch;
            `None` if nobody reads them.
        on_compile: What is called when a callback has compiled the model once more.
        is_held: Whether `dist_fit` ends the session, when all callbacks have ended:
            they may save and evaluate. Otherwise the first callback that ends does.
    """

    traced: TracedFunctions
    options: Any = None
    is_traced: bool = False
    first_step: FirstStep = field(default_factory=FirstStep)
    metrics: MetricScope = field(default_factory=MetricScope)
    eager_log: EagerLog = field(default_factory=EagerLog)
    feed: Feed | None = None
    rates: dict[str, float] | None = None
    on_compile: list[Callable[[], None]] = field(default_factory=list)
    is_held: bool = False

    @property
    def rows_trained(self) -> RowsTrained:
        """Rows that this rank has trained on in this epoch."""
        return self.traced.rows_trained

    @property
    def stop_request(self) -> StopRequest:
        """This rank's stop request, and whether all ranks have agreed."""
        return self.traced.stop_request

    @property
    def rows_seen(self) -> RowsSeen:
        """Batches and rows that the metrics have seen."""
        return self.traced.rows_seen

    @property
    def has_marks(self) -> bool:
        """True if batches to train on or to evaluate come with a mark (`marked`)."""
        return self.metrics.data.is_marked or self._is_marked

    @property
    def _is_marked(self) -> bool:
        return self.feed is not None and self.feed.adapter.is_marked

    def without_mark(self, data: Any) -> tuple[Any, Any]:
        """Split what a step is given into the batch and its mark.

        Returns:
            The batch, and whether it is this rank's own and not a copy: a boolean
            scalar, or `None` if it always is.
        """
        return split_mark(data) if self._is_marked else (data, None)

    def use(self, feed: Feed) -> None:
        """Set the training data of this fit."""
        self.feed = feed
        if feed.division is not None:
            self._set_position(feed.division.begin)

    def begin_epoch(self, epoch: int) -> None:
        """Let the data, and the position of the next step, begin an epoch."""
        assert self.feed is not None  # set before the first epoch
        step, division = self.feed.begin_epoch(epoch), self.feed.division
        if division is not None:
            self._set_position(division.span(step)[1])

    def _set_position(self, begin: int) -> None:
        division = self.feed.division if self.feed else None
        if division is not None:
            position = begin, division.total, division.global_batch
            self.traced.position.assign(position)

    @property
    def knows_rows(self) -> bool:
        """True if the rows of all ranks in a step are known without a collective."""
        division = None if self.feed is None else self.feed.division
        return division is not None and division.unit == "rows"

    @property
    def may_read_on(self) -> bool:
        """True if Keras may begin a step more, and see then that there is no batch.

        It does where it does not know the number of batches. One process knows it of
        data that is divided into steps here; but for an epoch that is resumed, in one
        process, too.
        """
        feed = self.feed
        if feed is None:
            return False
        is_known = feed.plan.steps_before is not None and comm.size() > 1
        return feed.has_epochs or is_known

    def next_rows_of_all(self) -> Any:
        """Count the rows of all ranks in the next step; `None` if unknown.

        It also moves the position behind the step; in a graph or not.
        """
        if not self.knows_rows:
            return None
        begin, total, per_step = tf.unstack(self.traced.position.read_value())
        rows = tf.minimum(per_step, total - begin)
        end = (begin + rows) % total
        self.traced.position.assign(tf.stack([end, total, per_step]))
        return rows


def session_of(model: Any) -> Session:
    """Return the session of a model that trains on many ranks (`step.install`)."""
    return model._distributed_session
