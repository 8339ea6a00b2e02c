"""How a start of a job has ended; how often it is started again, and after how long."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from keras_dist.launch.failures import print_message

# Seconds before a start after a host was lost; twice as long each time, up to a minute.
_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 10.0, 60.0


@dataclass(frozen=True)
class Outcome:
    """How one start of a job has ended.

    Args:
        code: The exit code.
        lost: Hosts that were lost, or could not be reached.
        has_saved: Whether it was stopped, and all ranks have saved.
        is_change: Whether nothing has failed, and the next start has other hosts.
        failed: The host that has failed; empty if none has.
        why: In a few words, what has happened.
    """

    code: int
    lost: Sequence[str] = ()
    has_saved: bool = False
    is_change: bool = False
    failed: str = ""
    why: str = ""


def begin_text(hosts: Mapping[str, int], *, is_importing: bool = True) -> str:
    """The line that says at once what is started: nothing else does, for some seconds.

    Args:
        hosts: Number of ranks of each host.
        is_importing: Whether the ranks will import TensorFlow, as far as is known.

    >>> print(begin_text({"localhost": 2}))
    keras-dist: 2 ranks on this host, importing TensorFlow
    """
    count = sum(hosts.values())
    where = f"{len(hosts)} hosts" if len(hosts) > 1 else next(iter(hosts))
    where = "this host" if where == "localhost" else where
    text = f"keras-dist: {count} rank{'s' * (count != 1)} on {where}"
    return f"{text}, importing TensorFlow" if is_importing else text


class Restarts:
    """Counts the restarts of a job.

    Args:
        most: The largest number of restarts.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._number = self._failures = self._lost_starts = 0

    @property
    def number(self) -> int:
        """Number of the restart: 0 in the first run."""
        return self._number

    @property
    def text(self) -> str:
        """How many restarts there were after failures, and may be; in words."""
        if not self._failures:
            return ""
        return f"restart {self._failures} of at most {self._most}"

    def count(self, *, is_failure: bool) -> bool:
        """Count a start of a job whose hosts come and go; whether there is one.

        Args:
            is_failure: Whether it follows a failure: others have no limit.
        """
        if is_failure and self._failures == self._most:
            return False
        self._failures += is_failure
        self._number += 1
        return True

    def wait(self, *, is_host_lost: bool, is_stopped: Callable[[], bool]) -> bool:
        """Wait until the next start, and announce it; whether there is one.

        Args:
            is_host_lost: Whether a host was lost, or could not be reached: one that
                boots takes its time, and must not use up all restarts.
            is_stopped: Whether the job was stopped, which ends the wait.
        """
        if self._number == self._most:
            return False
        seconds = min(_WAIT_SECONDS * 2**self._lost_starts, _LONGEST_WAIT_SECONDS)
        seconds = seconds if is_host_lost else 0.0
        self._lost_starts = self._lost_starts + 1 if is_host_lost else 0
        self._number += 1
        when = f", in {seconds:g} s" if seconds else ""
        print_message(
            f"keras-dist: start {self._number + 1} of at most {self._most + 1}{when}."
        )
        begin = time.monotonic()
        while time.monotonic() - begin < seconds and not is_stopped():
            time.sleep(0.1)
        return not is_stopped()
