"""End a job in which nobody makes progress, and say why."""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Collection
from typing import Any

from keras_dist.monitor import record, report, stacks, usage
from keras_dist.monitor.status_store import StatusStore, status_store_of

VARIABLE = "KERAS_DIST_STALL_SECONDS"
DEFAULT_LIMIT = 120.0

# The exit code of a job that was ended here: EX_SOFTWARE of sysexits.h. 75 is that of
# one that was told to end, and has saved.
EXIT_CODE = 70

# A thread that wakes up now and then to look around does not work. One that works has
# more of the processor than this, however many share it.
_IDLE_FRACTION = 0.02
_IDLE_SECONDS = 0.05
_IDLE_BYTES, _IDLE_RATE = 2**20, 50e3

# Others may have seen the last progress a little later.
_ALMOST = 0.8


class Progress:
    """When this rank last got on: it changed its place, computed, read or wrote.

    Args:
        without: Threads that do not count.
        now: The time, of `time.monotonic`.
    """

    def __init__(self, without: Collection[int], now: float) -> None:
        self.without = without
        self._last = now
        self._usage = usage.used(without=without)
        self._sum = (0.0, 0)
        self._changes = -1

    def idle(self, now: float) -> float:
        """Seconds without progress; called again and again."""
        usage_now = usage.used(without=self.without)
        seconds, size = usage.growth(self._usage, usage_now)
        self._usage = usage_now
        self._sum = self._sum[0] + seconds, self._sum[1] + size
        changes = record.here.position.changes
        if changes != self._changes or _is_work(self._sum, now - self._last):
            self._last, self._changes, self._sum = now, changes, (0.0, 0)
        return now - self._last

    def skip(self, seconds: float) -> None:
        """Leave out a time in which this process was stopped."""
        self._last += seconds


def _is_work(used: tuple[float, int], elapsed: float) -> bool:
    """Whether so much of the processor, or of files, is more than looking around.

    >>> _is_work((0.2, 0), 60.0), _is_work((6.0, 0), 60.0), _is_work((0.0, 2**21), 9.0)
    (False, True, True)
    """
    is_computing = used[0] > _IDLE_SECONDS + _IDLE_FRACTION * elapsed
    return is_computing or used[1] > _IDLE_BYTES + _IDLE_RATE * elapsed


class Watchdog(threading.Thread):
    """Looks at this rank all the time, and at the others when this one stands still.

    Args:
        rank: Of this process.
        size: How many ranks there are.
        limit: Seconds without progress of any rank after which the job ends.
        without: Horovod's threads, which look around for ever.
        store: Where the ranks tell each other; without one, each knows only itself.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        limit: float,
        without: Collection[int],
        store: StatusStore | None,
    ) -> None:
        super().__init__(name="keras_dist.monitor", daemon=True)
        self._rank, self._size, self._limit, self._store = rank, size, limit, store
        self._without = set(without)
        self._tick = min(max(limit / 12, 0.2), 5.0)
        self._over = threading.Event()
        self._beats = 0
        # Of other ranks: the last beat, when it was first seen, and what it had used.
        self._seen: dict[int, tuple[int, float, usage.Usage]] = {}

    def stop(self) -> None:
        """This process is about to end by itself."""
        self._over.set()

    def run(self) -> None:
        self._without.add(threading.get_native_id())
        before = time.monotonic()
        progress = Progress(self._without, before)
        while not self._over.wait(self._tick):
            now = time.monotonic()
            # Stopped by a signal, or a lid: nobody could make progress meanwhile.
            if now - before > 4 * self._tick + 2:
                progress.skip(now - before)
            before = now
            idle = progress.idle(now)
            self.publish(idle)
            if idle > self._limit / 2 and self._is_stalled(idle, now):
                self._end(idle)

    def publish(self, idle: float) -> None:
        """Let the others know how long this rank has stood still."""
        self._beats += 1
        if self._store is not None:
            self._store.put(str(self._rank), self._status(idle))

    def _status(self, idle: float) -> dict[str, Any]:
        position = record.here.position
        # To look at stacks takes time: only when it may matter.
        is_doubtful = idle > self._limit / 2 and not position.collective
        code = stacks.own_code(without=self) if is_doubtful else None
        return {
            "beat": self._beats,
            "idle": idle,
            "is_with_others": position.is_with_others,
            "collective": position.collective,
            "position": str(position),
            "code": code,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "without": sorted(self._without),
        }

    def _is_stalled(self, idle: float, now: float) -> bool:
        """Whether no rank gets on, and somebody waits for that."""
        if self._store is None:
            # Those that wait cannot know whether the others work; one that neither
            # works nor waits can.
            status = self._status(idle)
            return idle > self._limit and bool(
                status["is_with_others"] and status["code"]
            )
        if self._store.get("stalled"):
            return True
        statuses = [self._status(idle)]
        for rank in range(self._size):
            if rank != self._rank:
                status = self._store.get(str(rank))
                if status is None or not self._is_idle(rank, status, now):
                    return False
                statuses.append(status)
        return idle > self._limit and any(
            statuses["is_with_others"] for statuses in statuses
        )

    def _is_idle(self, rank: int, status: dict[str, Any], now: float) -> bool:
        beat, since, before = self._seen.get(rank, (-1, 0.0, {}))
        is_here = status["host"] == socket.gethostname()
        if status["beat"] == beat:
            # Its watchdog has no chance to run: stopped, ended, or at work in a library
            # that lets no other thread run.
            after = usage.used(status["pid"], without=status["without"])
            grown = usage.growth(before, after)
            if is_here and _is_work(grown, now - since):
                self._seen[rank] = beat, now, after
                return False
            return now - since > self._limit / 4
        used = usage.used(status["pid"], without=status["without"]) if is_here else {}
        self._seen[rank] = status["beat"], now, used
        return bool(status["idle"] > _ALMOST * self._limit)

    def _is_silent(self, rank: int, status: dict[str, Any]) -> bool:
        beat, since, _ = self._seen.get(rank, (-1, 0.0, {}))
        return bool(
            status["beat"] == beat and time.monotonic() - since > self._limit / 4
        )

    def _end(self, idle: float) -> None:
        own = self._status(idle)
        statuses = self._others(own)
        message = f"no rank has made progress for {self._limit:g} s"
        here = own["code"] or "it waits there"
        lines = [
            f"keras_dist: {message}, and the job ends. "
            f"Rank {self._rank} is {own['position']}: {here}.",
            *statuses,
            stacks.text(without=self),
            f"If this was work, raise the limit: {VARIABLE}=600, or 0 for no limit.",
        ]
        text = "\n".join(lines) + "\n"
        os.write(2, text.encode(errors="replace"))
        # Where some rank is in its own code and others wait for it, it is the cause.
        is_secondary = not own["code"] and any(
            "is missing" in line for line in statuses
        )
        report.write("Stalled", message, text, is_secondary=is_secondary)
        if self._store is not None:
            self._store.put("stalled", self._rank)
        sys.stdout.flush()
        time.sleep(2 * self._tick + 1)  # until the others have said where they are
        os._exit(EXIT_CODE)

    def _others(self, own: dict[str, Any]) -> list[str]:
        if self._store is None:
            return []
        ranks = range(self._size)
        statuses = {
            r: own if r == self._rank else self._store.get(str(r)) for r in ranks
        }
        waiting: dict[str, list[int]] = {}
        lines = []
        for rank, status in statuses.items():
            if status is None or self._is_silent(rank, status):
                lines.append(f"Rank {rank} is missing: it does not answer.")
            elif status["code"]:
                where = f"{status['position']}, {status['code']}"
                lines.append(f"Rank {rank} is missing: {where}.")
            else:
                waiting.setdefault(status["position"], []).append(rank)
        for position, there in waiting.items():
            names = ", ".join(map(str, there))
            lines.append(f"Waiting {position}: rank{'s' * (len(there) > 1)} {names}.")
        return lines


_watchdog: list[Watchdog] = []
_limit: list[float] = []


def limit_of(argument: float | None = None) -> float:
    """Seconds without progress after which a job ends; 0 for never.

    Args:
        argument: Of the user; by default the environment's, else 120.

    Raises:
        ValueError: If it is no number, or negative.
    """
    given = os.environ.get(VARIABLE) if argument is None else argument
    try:
        limit = DEFAULT_LIMIT if given is None else float(given)
    except (TypeError, ValueError):
        limit = -1.0
    if not limit >= 0:
        raise ValueError(
            "The limit for ranks without progress must be a number of seconds, or 0 "
            f"for none. Received: {given!r}. Set it with {VARIABLE} or `stall_limit`."
        )
    return limit


def set_limit(argument: float | None) -> None:
    """Take the limit from an argument of the user's; before `start`."""
    if argument is not None:
        _limit[:] = [limit_of(argument)]


def start(*, rank: int, size: int, without: Collection[int]) -> None:
    """Watch this rank from now on; one rank alone waits for nobody.

    Args:
        rank: Of this process.
        size: How many ranks there are.
        without: Threads of Horovod's.
    """
    limit = _limit[0] if _limit else limit_of()
    if size > 1 and limit and not _watchdog:
        watchdog = Watchdog(
            rank=rank, size=size, limit=limit, without=without, store=status_store_of()
        )
        _watchdog.append(watchdog)
        # Before anything can happen to this rank: one that was never there is not
        # waited for.
        watchdog.publish(0.0)
        watchdog.start()
        atexit.register(watchdog.stop)
