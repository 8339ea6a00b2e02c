"""Whether a metric's result that is read now is one over all ranks."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from keras_dist import comm
from keras_dist.data import Feed, own_error
from keras_dist.optimizer import step_context


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is running.

    Args:
        is_of_all: Whether it runs on all ranks.
    """

    is_of_all: bool


@dataclass(frozen=True)
class EvaluatedData:
    """Facts about the data of evaluations.

    Args:
        has_rows: `False` if this rank evaluates a row of another rank, since it has
            none.
        feeds: The feeds of the data, which hold errors that the user's data raised.
    """

    has_rows: bool = True
    feeds: tuple[Feed, ...] = ()

    def own_error(self, error: Exception) -> Exception:
        """The user's own error, if `error` is what TensorFlow raised because of it."""
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
        self._evaluation: Evaluation | None = None
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
        """Whether a result that is read now is one over all ranks."""
        if step_context.is_inside() or not self._averages:
            return False
        return self._evaluation is None or self._evaluation.is_of_all

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation is running."""
        return self._evaluation is not None

    def is_waited_for(self) -> bool:
        """Whether the other ranks wait for the result of this evaluation."""
        return self.is_of_all() and not self._has_result

    def is_opening(self) -> bool:
        """Whether the other ranks wait for this one to open the validation data."""
        return self._is_opening

    def begin_result(self) -> bool:
        """Note that a result over all ranks is taken; return whether own rows count."""
        self._has_result = True
        self._is_opening = self._evaluation is None
        return self._data.has_rows or self._evaluation is None

    def end_opening(self) -> None:
        """The validation data is open, or there is none; metrics were reset."""
        self._is_opening = False

    @contextlib.contextmanager
    def evaluation(self, *, is_of_loop: bool) -> Iterator[None]:
        """Inside the block, an evaluation runs.

        Args:
            is_of_loop: Whether the loop of `Model.fit` calls it, on all ranks. A
                callback that calls `evaluate` may do so on one rank only, so its
                result is that rank's.
        """
        before = self._evaluation, self._has_result
        is_of_all = is_of_loop or (self._is_collective and before[0] is None)
        self._evaluation, self._has_result = Evaluation(is_of_all), False
        self._is_opening = False
        try:
            yield
        finally:
            self._evaluation, self._has_result = before

    @contextlib.contextmanager
    def collective_evaluation(self, data: EvaluatedData) -> Iterator[None]:
        """Inside the block, the next evaluation runs on all ranks, and reads `data`."""
        before = (
            self._averages,
            self._is_collective,
            self._evaluation,
            self._data,
        )
        self._averages = self._is_collective = True
        self._evaluation, self._data = None, data
        try:
            yield
        finally:
            (
                self._averages,
                self._is_collective,
                self._evaluation,
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
