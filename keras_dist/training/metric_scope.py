"""Whether a result of metrics that is read now is one over all ranks."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from keras_dist import comm, sharding
from keras_dist.optimizer import step_context


@dataclass(frozen=True)
class Evaluation:
    """One evaluation that is under way.

    Args:
        is_of_all: Whether all ranks make it together.
    """

    is_of_all: bool


@dataclass(frozen=True)
class EvaluatedData:
    """What is known of the data of evaluations.

    Args:
        has_rows: `False` where this rank evaluates a row of another rank's.
        feeds: Of the data; what the user's data raised is found in them.
    """

    has_rows: bool = True
    feeds: tuple[sharding.Feed, ...] = ()

    def own_error(self, error: Exception) -> Exception:
        """What the user's data raised, where `error` is what TensorFlow made of it."""
        return sharding.own_error(self.feeds, error)


class MetricScope:
    """Whose rows a result of the metrics is over, and whether ranks wait for it.

    Inside of a step, metrics are this rank's own. At the end of an epoch, and of an
    evaluation that all ranks make, their state is summed over all ranks: a collective,
    in which all ranks have to take part. `is_of_all` says which it is; the methods say
    when that changes. A fit goes through these states:

    - *steps*: `is_opening` is false, and no evaluation is under way;
    - *opening*: the results of the training were taken; Keras opens the validation
      data, and the ranks that have done so wait for the others;
    - *evaluation*: `begin_evaluation`; then its result is taken.
    """

    def __init__(self) -> None:
        self._averages = False
        self._is_opening = False
        self._evaluation: Evaluation | None = None
        self._has_result = False
        self._is_collective = False
        self._data = EvaluatedData()

    def average(self) -> None:
        """From now on results are taken over all ranks."""
        self._averages = True

    def use(self, data: EvaluatedData) -> None:
        """Say what evaluations of this fit read."""
        self._data = data

    @property
    def data(self) -> EvaluatedData:
        """Of the present evaluation, or of those of this fit."""
        return self._data

    def is_of_all(self) -> bool:
        """Whether a result that is read now is one over all ranks."""
        if step_context.is_inside() or not self._averages:
            return False
        return self._evaluation is None or self._evaluation.is_of_all

    def is_waited_for(self) -> bool:
        """Whether the other ranks wait for the result of this evaluation."""
        return self.is_of_all() and not self._has_result

    def is_opening(self) -> bool:
        """Whether the other ranks wait for this one to open the validation data."""
        return self._is_opening

    def take_result(self) -> bool:
        """A result over all ranks is taken now; whether this rank's rows count."""
        self._has_result = True
        self._is_opening = self._evaluation is None
        return self._data.has_rows or self._evaluation is None

    def end_opening(self) -> None:
        """The validation data is open, or there is none; metrics begin anew."""
        self._is_opening = False

    @contextlib.contextmanager
    def evaluation(self, *, is_of_loop: bool) -> Iterator[None]:
        """Around an evaluation.

        Args:
            is_of_loop: Whether Keras's own loop of the fit makes it, on all ranks. One
                that a callback makes is its own affair: perhaps it is on one rank only.
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
        """Inside the block, the next evaluation is one of all ranks, of `data`."""
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
        """Inside the block an evaluation is one of this rank, without the others."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before


@contextlib.contextmanager
def raising_on_all(
    own_error: Callable[[Exception], Exception], is_waited_for: Callable[[], bool]
) -> Iterator[Any]:
    """Inside the block, an error on this rank is raised on those that wait for it.

    Args:
        own_error: What the user's data raised, of an error.
        is_waited_for: Whether the next thing that the other ranks do is a
            `comm.gather_or_raise` or `comm.run_on_all`; asked when an error was raised.
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
