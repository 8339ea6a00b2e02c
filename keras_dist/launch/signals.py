"""Signals that stop a job: Ctrl-C, SIGTERM and SIGHUP."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[list[int]]:
    """Inside the block, signals that stop a job do not end this process.

    Yields:
        A list, to which the number of each such signal is appended.
    """
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    before = {number: signal.signal(number, stop) for number in _STOPS}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_saving(stopped: Sequence[int]) -> bool:
    """Whether the first signal gives the ranks time to save."""
    return list(stopped[:1]) == [signal.SIGTERM]
