"""What a model that trains on many ranks remembers."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from keras_dist import comm


@dataclass
class Session:
    """What a model that trains on many ranks remembers during one fit.

    Args:
        before_first_step: Called in order, outside of any graph, when the first
            train step is about to run and the model is built.
        rows: Rows that this rank has trained on since the count was read.
        rows_before: Of them, those that another process has trained on.
        position: Number of the next step, counted from the beginning of epoch 0.
        rows_of_all: Rows that all ranks together read at a step, as a function of its
            number, where that is known beforehand.
        builds_first: Whether all is built before the first step on one rank, too.
        in_step: Inside a step, metrics stay this rank's own.
        averages_metrics: Whether results are taken over all ranks.
        seen: Batches, rows, and rows of the last batch, that the metrics have been
            shown since they were reset.
        has_validation_rows: `False` where this rank evaluates but must not count.
        has_result: Whether the present evaluation has come to its result.
        is_opening: Whether an epoch is over, and validation data may be opened.
        own_error: What the user's data raised, of an error of an evaluation.
        is_shared: Whether all ranks make the present evaluation together.
        is_jitted: Whether Keras asked for XLA.
        agrees_on_stop: Whether a wish to stop waits until all ranks know of it.
        requests_stop: Whether this rank wishes to stop.
        stop_request: The same as a number, which travels with the gradients.
        agreed: Wishes of all ranks that have arrived with gradients; equal on all.
        stopwatch: Of the parts of each step, where somebody wants to know.
        guard: Looks at gradients before they are applied, where somebody wants it.
        training: What is known of the training data.
        is_held: Whether callbacks leave it to `dist_fit` to end the session: others,
            at the end of the training, still save and evaluate with it.
        progress: Epochs that are done and the last batch, for files of weights.
        compiled: What the model was compiled with.
        plain_test_function: What the plain model evaluates with.
        test_function: What this one has traced, kept for the next session.
    """

    before_first_step: list[Callable[[], None]] = field(default_factory=list)
    rows: Any = None
    rows_before: int = 0
    seen: Any = None
    position: Any = None
    rows_of_all: Callable[[Any], Any] | None = None
    has_started: bool = False
    builds_first: bool = False
    in_step: bool = False
    is_evaluating: bool = False
    averages_metrics: bool = False
    has_validation_rows: bool = True
    is_shared: bool = False
    has_result: bool = False
    is_opening: bool = False
    own_error: Callable[[Exception], Exception] = lambda error: error
    is_jitted: bool = False
    agrees_on_stop: bool = False
    requests_stop: bool = False
    stop_request: Any = None
    agreed: Any = None
    stopwatch: Any = None
    guard: Any = None
    training: Any = None
    is_held: bool = False
    progress: tuple[int, int] | None = None
    compiled: tuple[Any, ...] = ()
    plain_test_function: Any = None
    test_function: Any = None


@contextlib.contextmanager
def raising_on_all(
    session: Session, is_waited_for: Callable[[], bool]
) -> Iterator[None]:
    """Inside the block, an error on this rank is one on those that wait for it too.

    Args:
        session: Of the model.
        is_waited_for: Whether the next thing that the other ranks do together is a
            `comm.share` or `comm.together`; asked when an error was raised.
    """
    try:
        yield
    except Exception as error:
        if comm.size() > 1 and is_waited_for() and not comm.is_known(error):
            _raise_on_all(session.own_error(error))
        raise


def _raise_on_all(error: Exception) -> NoReturn:
    def fail() -> NoReturn:
        raise error

    comm.gather_or_raise(fail)
    raise error
