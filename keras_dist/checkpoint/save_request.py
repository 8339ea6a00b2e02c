"""Who wants to save or to end, and when all ranks know it."""

import signal
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

from keras_dist import comm
from keras_dist.training.session import session_of


class Agreed(NamedTuple):
    """What all ranks do now.

    Args:
        save: A rank's time has come.
        end: A rank was asked to end.
    """

    save: bool = False
    end: bool = False


class SaveRequests:
    """Of this rank: SIGTERM, and on the first rank the clock.

    On several ranks a wish travels with the gradients of the next update, as a wish to
    stop does. After it all ranks ask each other what is wished. So they do the same at
    the same step, and a step without a wish costs nothing.

    Args:
        seconds: From checkpoint to checkpoint, if any.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._saved_at = time.monotonic()
        self._is_asked = self.is_leaving = False
        self._before: Any = None
        self._is_installed = False

    def begin(self) -> None:
        """From now on, SIGTERM is a wish, and the clock runs."""
        self._saved_at = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
            self._is_installed = True

    def finish(self) -> None:
        """SIGTERM is again what it was; if this process ends by it, it is nothing."""
        if self._is_installed:
            self._is_installed = False
            after = signal.SIG_IGN if self.is_leaving else self._before
            signal.signal(signal.SIGTERM, signal.SIG_DFL if after is None else after)

    def request(self, model: Any) -> None:
        """Give this rank's wish to the gradients of the next update."""
        if comm.size() > 1 and (self._is_asked or self._is_due()):
            session_of(model).stop_request.ask_to_save()

    def agreed(self, model: Any) -> Agreed:
        """After a batch, what all ranks do; the same on all of them."""
        if comm.size() == 1:
            return Agreed(self._is_due(), self._is_asked)
        stop_request = session_of(model).stop_request
        if not stop_request.is_agreed():
            return Agreed()
        everyone = comm.gather((self._is_due(), self._is_asked, stop_request.is_asked))
        if any(is_stop for _, _, is_stop in everyone):
            return Agreed()  # the epoch ends now, and its end saves
        stop_request.clear()
        return Agreed(*map(any, list(zip(*everyone, strict=True))[:2]))

    def settled(self, model: Any) -> Agreed:
        """At the end of an epoch, what all ranks do; the wishes have been granted."""
        if comm.size() > 1:
            session_of(model).stop_request.clear()
        return Agreed(end=any(comm.gather(self._is_asked)))

    def has_saved(self) -> None:
        """The clock begins anew."""
        self._saved_at = time.monotonic()

    def _is_due(self) -> bool:
        if self._seconds is None or comm.rank() != 0:
            return False
        return time.monotonic() - self._saved_at >= self._seconds

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
