"""How a trial begins and ends on all ranks."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from keras_dist import comm
from keras_dist.training.session import is_of_one_rank

Result = TypeVar("Result")


class _EndsJob(KeyboardInterrupt):
    """An error that other ranks do not know of, and wait: no library may catch it."""


def run(lead: Callable[[], None], join: Callable[[Any], Any]) -> None:
    """Run the library's search on the first rank, and its trials on all.

    Args:
        lead: The search. For each trial it calls `begin` and `on_all`.
        join: What another rank does, with what the first one has given to `begin`.
    """
    with _own_error():
        if comm.rank() == 0:
            _lead(lead)
            return
        while (trial := _next_trial()) is not None:
            # The first rank has raised it, too, and decides what is next.
            with contextlib.suppress(Exception):
                on_all(functools.partial(join, trial[0]))


def _lead(lead: Callable[[], None]) -> None:
    try:
        lead()
    except Exception as error:
        comm.run_on_all(functools.partial(_raise, error))
    comm.gather_or_raise(lambda: None)


def begin(trial: Any) -> None:
    """Call the other ranks to a trial."""
    comm.gather_or_raise(lambda: (trial,))


def _next_trial() -> Any:
    """Return the first rank's next trial in a tuple; `None` at the search's end."""
    return comm.gather_or_raise(lambda: None)[0]


def on_all(work: Callable[[], Result]) -> Result:
    """Call `work` on all ranks; if one raises, all raise.

    Raises:
        _EndsJob: If the other ranks cannot learn of an error.
    """
    try:
        result = work()
    except Exception as error:
        if comm.is_known(error):
            raise
        if comm.size() > 1 and is_of_one_rank(error):
            raise _EndsJob from error
        # This meets the next such call of the other ranks: in `dist_fit`, in a
        # suggestion, or at the end of the trial.
        comm.run_on_all(functools.partial(_raise, error))
        raise
    comm.run_on_all(lambda: None)
    return result


@contextlib.contextmanager
def _own_error() -> Iterator[None]:
    """Inside the block, the error behind an `_EndsJob` is raised in its place."""
    try:
        yield
    except _EndsJob as ending:
        assert ending.__cause__ is not None
        raise ending.__cause__ from None


def of_first(work: Callable[[], Result]) -> Result:
    """Return on all ranks what `work` returns, or raises, on the first one."""
    is_first = comm.rank() == 0
    found: Any = comm.gather_or_raise(lambda: work() if is_first else None)[0]
    return found


def check_first(found: Any, name: str, function: str) -> None:
    """Raise an error on all ranks if the first one does not have what it needs."""

    def check() -> None:
        if comm.rank() == 0 and found is None:
            raise ValueError(
                f"The first rank needs the {name}. Received: {name}=None on rank 0. "
                f"Make it where keras_dist.rank() is 0, and call tune.{function} on "
                "all ranks."
            )

    comm.run_on_all(check)


def _raise(error: Exception) -> NoReturn:
    raise error
