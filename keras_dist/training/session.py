"""The state of a model that trains on many ranks, during one fit."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import tensorflow as tf

from keras_dist import comm, private
from keras_dist.data import Feed, own_error
from keras_dist.optimizer import StopRequest, step_context
from keras_dist.optimizer.step_context import own_variable
from keras_dist.training.build import FirstStep
from keras_dist.training.loss_kind import EagerLog
from keras_dist.training.metrics import UpdateCounts


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
    """Keeps the test function of a distributed model from one fit to the next.

    The train function is traced again in each fit: one that was traced before does not
    average gradients. The test function is valid until the model is compiled again.

    Args:
        model: A `keras.Model`, plain at this time.
        last: The traced functions of the fit before, if there was one.

    Attributes:
        rows_seen: Batches and rows that the metrics have seen.
    """

    def __init__(self, model: Any, last: "TracedFunctions | None") -> None:
        self._compiled = _compiled(model)
        self._plain_test_function = model.test_function
        self._test_function: Any = None
        self.rows_seen = RowsSeen()
        if last is not None and _is_same(last._compiled, self._compiled):
            # It counts in the variable with which it was traced.
            self._test_function, self.rows_seen = last._test_function, last.rows_seen

    def enter(self, model: Any) -> None:
        """Give a model that becomes distributed the test function of the last fit."""
        model.train_function = None
        model.test_function = self._test_function

    def leave(self, model: Any) -> None:
        """Keep the test function, and give the plain model back its own."""
        model.train_function = None
        self._test_function = model.test_function
        is_same = _is_same(self._compiled, _compiled(model))
        model.test_function = self._plain_test_function if is_same else None


def _compiled(model: Any) -> tuple[Any, ...]:
    """List what `compile` makes, and options for which Keras traces again."""
    made = private.compiled_parts(model)
    return *made, model.run_eagerly, model.jit_compile, model.steps_per_execution


def _is_same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    is_known = any(found is not None for found in now[:2])
    pairs = zip(before, now, strict=True)
    return is_known and all(old is new or old == new for old, new in pairs)


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
        part = validation.part
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
        is_waited_for: Whether the next call of the other ranks is
            `comm.gather_or_raise` or `comm.run_on_all`; called after an error.
    """
    try:
        yield
    except Exception as error:
        if comm.size() > 1 and is_waited_for() and not comm.is_known(error):
            _raise_on_all(own_error(error))
        raise


def _raise_on_all(error: Exception) -> NoReturn:
    def fail() -> NoReturn:
        raise error

    comm.gather_or_raise(fail)
    raise error


@dataclass
class Session:
    """What a model that trains on many ranks remembers, until its fit is over.

    Args:
        traced: The test function that Keras has traced, which the next fit may reuse.
        first_step: Builds the model, then calls hooks.
        stop_request: This rank's stop request, and whether all ranks have agreed.
        metrics: Whether a metric's result is one over all ranks.
        rows_trained: Rows that this rank has trained on in this epoch.
        eager_log: Which losses of a step that runs eagerly are sums over rows.
        feed: The training data.
        step: The number of the next step, a variable.
        is_split: Whether steps run in two functions that XLA compiles, with an
            allreduce between them.
        rates: The learning rates of the epoch's last updates, by a name for the logs,
            before callbacks such as `ReduceLROnPlateau` set those of the next epoch;
            `None` if nobody reads them.
        is_held: Whether `dist_fit` ends the session, when all callbacks have ended:
            they may save and evaluate. Otherwise the first callback that ends does.
    """

    traced: TracedFunctions
    first_step: FirstStep = field(default_factory=FirstStep)
    stop_request: StopRequest = field(default_factory=StopRequest)
    metrics: MetricScope = field(default_factory=MetricScope)
    rows_trained: RowsTrained = field(default_factory=RowsTrained)
    eager_log: EagerLog = field(default_factory=EagerLog)
    feed: Feed | None = None
    step: tf.Variable = field(default_factory=lambda: _counter(0))
    is_split: bool = False
    rates: dict[str, float] | None = None
    is_held: bool = False

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
        return self.feed is not None and self.feed.part.is_marked

    def without_mark(self, data: Any) -> tuple[Any, Any]:
        """Split what a step is given into the batch and its mark.

        Returns:
            The batch, and whether it is this rank's own and not a copy: a boolean
            scalar, or `None` if it always is.
        """
        return split_mark(data) if self._is_marked else (data, None)

    def begin_epoch(self, epoch: int) -> None:
        """Let the data, and the number of the next step, begin an epoch."""
        assert self.feed is not None  # set before the first epoch
        self.step.assign(self.feed.begin_epoch(epoch))

    def next_rows_of_all(self) -> Any:
        """Count the rows of all ranks in the next step; `None` if unknown.

        It also increments the number of the step; in a graph or not.
        """
        division = None if self.feed is None else self.feed.division
        if division is None or division.unit != "rows":
            return None
        _, begin, end = division.span(self.step.read_value())
        self.step.assign_add(1)
        return end - begin


def session_of(model: Any) -> Session:
    """Return the session of a model that trains on many ranks (`step.install`)."""
    return model._distributed_session
