"""Signals that stop a job: Ctrl-C, SIGTERM and SIGHUP."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

# The exit code of a job whose ranks have saved, as `checkpoint.EXIT_CODE`.
SAVED = 75

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAVES = (signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def stopped_by_signals(*others: signal.Signals) -> Iterator[list[int]]:
    """Inside the block, signals that stop a job do not end this process.

    Args:
        *others: Signals that stop this job beside Ctrl-C, SIGTERM and SIGHUP.

    Yields:
        A list, to which the number of each such signal is appended.
    """
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    before = {number: signal.signal(number, stop) for number in (*_STOPS, *others)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_saving(stopped: Sequence[int]) -> bool:
    """Whether the first signal gives the ranks time to save."""
    return bool(stopped) and stopped[0] in _SAVES


def is_ordered(stopped: Sequence[int]) -> bool:
    """Whether the end is by order of the first host of those that meet.

    The order counts as SIGHUP, which a process gets whose terminal is gone.
    """
    return bool(stopped) and stopped[0] == signal.SIGHUP


def stopped_text(number: int, *, has_saved: bool, host: str = "") -> str:
    """The line that says that a signal has ended the job.

    Args:
        number: Number of the signal.
        has_saved: Whether all ranks have saved.
        host: Where it was received, if there are several hosts.
    """
    saved = "; the ranks have saved, and the same command goes on from there"
    where = f" on {host}" if host else ""
    name = signal.Signals(number).name
    return f"keras-dist: ended by {name}{where}{saved if has_saved else ''}."
