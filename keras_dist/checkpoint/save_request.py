"""Requests to save or to end, on which all ranks agree before they act."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

from keras_dist import comm
from keras_dist.training.session import session_of


class Agreed(NamedTuple):
    """What all ranks have agreed to do now.

    Args:
        save: Write a checkpoint: `save_seconds` have passed.
        end: Save and end: a rank has received SIGTERM.
    """

    save: bool = False
    end: bool = False


class SaveRequests:
    """This rank's requests: SIGTERM, to end; on the first rank the clock, to save.

    On several ranks a request is sent with the gradients of the next update, as a stop
    request is. After that update the ranks gather what was requested, and so act on it
    after the same step. A step without a request needs no collective for this.

    Args:
        seconds: From checkpoint to checkpoint; `None` for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._saved_at = time.monotonic()
        self._is_asked = self.is_leaving = False
        # The handlers of signals before.
        self._before: dict[signal.Signals, Any] = {}

    def begin(self) -> None:
        """Start the clock; from now on, SIGTERM is a request to save and end."""
        self._saved_at = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            for number in _signals():
                self._before[number] = signal.signal(number, self._ask)

    def finish(self) -> None:
        """Restore the handlers; ignore the signals if they end this process."""
        for number, before in self._before.items():
            after = signal.SIG_IGN if self.is_leaving else before
            signal.signal(number, signal.SIG_DFL if after is None else after)
        self._before.clear()

    def request(self, model: Any) -> None:
        """If this rank has a request, send it with the gradients of the next update."""
        if comm.size() > 1 and (self._is_asked or self._is_due()):
            session_of(model).stop_request.ask_to_save()

    def agreed(self, model: Any) -> Agreed:
        """What to do after this batch; equal on all ranks."""
        if comm.size() == 1:
            return Agreed(self._is_due(), self._is_asked)
        stop_request = session_of(model).stop_request
        if not stop_request.is_agreed():
            return Agreed()
        everyone = comm.gather((self._is_due(), self._is_asked, stop_request.is_asked))
        if any(is_stop for _, _, is_stop in everyone):
            return Agreed()  # the epoch ends now, which writes a checkpoint
        stop_request.clear()
        return Agreed(*map(any, list(zip(*everyone, strict=True))[:2]))

    def settled(self, model: Any) -> Agreed:
        """What to do at the end of an epoch; drop the requests of its batches."""
        if comm.size() > 1:
            session_of(model).stop_request.clear()
        return Agreed(end=any(comm.gather(self._is_asked)))

    def has_saved(self) -> None:
        """Restart the clock."""
        self._saved_at = time.monotonic()

    def _is_due(self) -> bool:
        if self._seconds is None or comm.rank() != 0:
            return False
        return time.monotonic() - self._saved_at >= self._seconds

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True


def _signals() -> list[signal.Signals]:
    """The signals that ask to save and end; SLURM sends the second one on demand."""
    if "SLURM_JOB_ID" in os.environ:
        return [signal.SIGTERM, signal.SIGUSR1]
    return [signal.SIGTERM]
