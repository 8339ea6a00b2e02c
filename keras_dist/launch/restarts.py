"""How often a job is started again, and when; who is left out; the lines about it."""

import time
from collections.abc import Callable, Iterable, Mapping

from keras_dist.launch.failures import print_message

# The variable by which the ranks know that hosts come and go: `--nnodes`.
NNODES = "KERAS_DIST_NNODES"

# Seconds for which a job that has enough hosts waits for one more to come.
SETTLE_SECONDS = 5.0

# How often it is started again after failures, if hosts come and go and the user does
# not say.
RESTARTS = 3

# Seconds before a start after a host was lost; twice as long each time, up to a minute.
_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 10.0, 60.0

# A host that fails so often in so many seconds is left out, for as many.
_MOST_FAILURES, _PERIOD_SECONDS = 3, 600.0


class Restarts:
    """Counts the starts of a job, and says whether there is another one.

    Args:
        most: The largest number of restarts after failures.
        is_elastic: Whether hosts come and go: then the next start follows at once, on
            the hosts that are there, and starts for other reasons have no limit.
    """

    def __init__(self, most: int, *, is_elastic: bool = False) -> None:
        self._most, self._is_elastic = most, is_elastic
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

    def another(
        self,
        *,
        is_failure: bool = True,
        is_host_lost: bool = False,
        is_stopped: Callable[[], bool] = bool,
    ) -> bool:
        """Count one more start, and wait for its time; whether there is one.

        Args:
            is_failure: Whether it follows a failure.
            is_host_lost: Whether a host was lost, or could not be reached: one that
                boots takes its time, and must not use up all restarts.
            is_stopped: Whether the job was stopped, which ends the wait.
        """
        if is_failure and self._failures == self._most:
            return False
        self._failures += is_failure
        self._number += 1
        if self._is_elastic:
            return True
        seconds = min(_WAIT_SECONDS * 2**self._lost_starts, _LONGEST_WAIT_SECONDS)
        seconds = seconds if is_host_lost else 0.0
        self._lost_starts = self._lost_starts + 1 if is_host_lost else 0
        when = f", in {seconds:g} s" if seconds else ""
        print_message(
            f"keras-dist: start {self._number + 1} of at most {self._most + 1}{when}."
        )
        begin = time.monotonic()
        while time.monotonic() - begin < seconds and not is_stopped():
            time.sleep(0.1)
        return not is_stopped()


class LeftOut:
    """The hosts that have failed too often, each for a while.

    Args:
        clock: Seconds from some moment on.

    >>> now = 0.0
    >>> left_out = LeftOut(lambda: now)
    >>> left_out.add("c"), left_out.add("c"), left_out.add("c")
    (False, False, True)
    >>> left_out.seconds("c"), left_out.seconds("d")
    (600.0, 0.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, list[float]] = {}
        self._until: dict[str, float] = {}

    def add(self, host: str) -> bool:
        """Note that a host has failed; whether it is left out from now on."""
        now = self._clock()
        recent = [t for t in self._failures.get(host, []) if now - t < _PERIOD_SECONDS]
        self._failures[host] = [*recent, now]
        if len(recent) + 1 < _MOST_FAILURES:
            return False
        del self._failures[host]
        self._until[host] = now + _PERIOD_SECONDS
        return True

    def take_back(self, hosts: Iterable[str]) -> str:
        """Let one of these hosts take part again, since too few others are there.

        Args:
            hosts: Those that could take part.

        Returns:
            The one whose time would end first; empty if none is left out.
        """
        out = [host for host in hosts if self.seconds(host)]
        if not out:
            return ""
        first = min(out, key=self.seconds)
        del self._until[first]
        return first

    def seconds(self, host: str) -> float:
        """Return for how many seconds a host is still left out; 0 if it is not."""
        return max(0.0, self._until.get(host, 0.0) - self._clock())


def left_out_text(host: str) -> str:
    """Return the line that says that a host is left out."""
    return (
        f"keras-dist: host {host} has failed {_MOST_FAILURES} times in "
        f"{_PERIOD_SECONDS / 60:g} minutes, and is left out for as long."
    )


def taken_back_text(host: str) -> str:
    """Return the line that says that a host is no longer left out."""
    return f"keras-dist: too few hosts are left; host {host} takes part again."


def waiting_text(most: int) -> str:
    """Return the line that says that a job has no use for a host now."""
    return (
        f"keras-dist: the job has {most} hosts, the most that `--nnodes` allows. This "
        "one waits, and takes part when another one is lost."
    )


def start_text(
    number: int,
    counted: str,
    why: str,
    hosts: Mapping[str, int],
    before: Mapping[str, int],
    limits: tuple[int, int],
) -> str:
    """Return the line that says which hosts take part in a start, and what has changed.

    Args:
        number: Number of the start, from 0.
        counted: How many of the restarts that are allowed were needed, in words.
        why: Why there is another start; several reasons with semicolons.
        hosts: Number of ranks of each host.
        before: The same of the start before; empty at the first one.
        limits: How many hosts the job has at least, and at most.

    >>> print(start_text(0, "", "", {"a": 2, "b": 2}, {}, (2, 4)))
    keras-dist: start 1: 4 ranks on 2 hosts (a, b), of 2 to 4.
    >>> print(start_text(1, "restart 1 of at most 3", "host b was lost", {"a": 2},
    ...     {"a": 2, "b": 2}, (1, 4)))
    keras-dist: start 2 (restart 1 of at most 3): host b was lost; 2 ranks on 1 host \
(a), before 4 ranks on 2 hosts.
    """
    has_come = [f"host {host} has come" for host in hosts if host not in before]
    reasons = [*why.split("; "), *(has_come if before else [])]
    reasons = [reason for reason in dict.fromkeys(reasons) if reason]
    now = f"{_size(hosts)} ({', '.join(hosts)})"
    since = f"before {_size(before)}" if before else f"of {limits[0]} to {limits[1]}"
    counted = f" ({counted})" if counted else ""
    return (
        f"keras-dist: start {number + 1}{counted}: {'; '.join([*reasons, now])}, "
        f"{since}."
    )


def _size(hosts: Mapping[str, int]) -> str:
    ranks, count = sum(hosts.values()), len(hosts)
    return f"{ranks} rank{'s' * (ranks != 1)} on {count} host{'s' * (count != 1)}"


def begin_text(hosts: Mapping[str, int], *, is_importing: bool = True) -> str:
    """Return the line that says what is started: nothing else does, for seconds.

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
