"""A thread in each rank that ends the job if no rank makes progress, and says why.

CPU time and bytes are read for each thread (Linux), since Horovod's threads, which poll
all the time, do not count; `psutil` has bytes for whole processes alone.
"""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from keras_dist.launch.failures import ranks_in_words
from keras_dist.launch.monitor import rank_process, record, stacks
from keras_dist.launch.monitor.end_note import note_end
from keras_dist.launch.store import StoreClient, client_of

VARIABLE = "KERAS_DIST_STALL_SECONDS"
DEFAULT_LIMIT = 120.0

# The exit code of a rank that ends the job: EX_SOFTWARE of sysexits.h. (75 is the exit
# code of a rank that was asked to end and has saved a checkpoint.)
EXIT_CODE = 70

# Name in the store, beside the heartbeats, whose names are the numbers of the ranks, of
# what the first rank to find a stall has found.
_STALLED = "stalled"

# In the line about ranks for which the others wait.
_MISSING = " missing: "

# Another rank counts as idle after this fraction of the limit, since the last progress
# of all may have been noticed a little later there.
_ALMOST = 0.8

# A rank has no heartbeat after this fraction of the limit without a new one.
_SILENT = 0.25

_TICKS = os.sysconf("SC_CLK_TCK")

# For each thread: CPU time in seconds, and bytes read and written.
Usage = dict[int, tuple[float, int]]

# A process that waits still uses a little CPU time and reads a few bytes, in threads
# that wake up to poll. Up to these limits it counts as idle. They are so low that a
# process which works is above them even if many processes share the core.
_IDLE_FRACTION = 0.02
_IDLE_SECONDS = 0.05
_IDLE_BYTES, _IDLE_RATE = 2**20, 50e3


class Watchdog(threading.Thread):
    """A thread that checks this rank, and all other ranks while this one is idle.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        limit: The job ends if no rank makes progress for this many seconds.
        ignored_threads: Ids of Horovod's threads, which poll all the time.
        store: The store in which the ranks keep their heartbeats; with `None` each
            rank knows only about itself.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        limit: float,
        ignored_threads: Collection[int],
        store: StoreClient | None,
    ) -> None:
        super().__init__(name="keras_dist.monitor", daemon=True)
        self._rank, self._size, self._limit = rank, size, limit
        self._ignored_threads, self._store = set(ignored_threads), store
        self._tick = min(max(limit / 12, 0.2), 5.0)
        self._stop_event = threading.Event()
        self._beats = 0
        # For each other rank: its last heartbeat, when that was first seen, and what
        # the process had used by then.
        self._seen: dict[int, tuple[int, float, Usage]] = {}

    def stop(self) -> None:
        """Stop watching, because this process is about to exit."""
        self._stop_event.set()

    def run(self) -> None:
        self._ignored_threads.add(threading.get_native_id())
        before = time.monotonic()
        progress = Progress(self._ignored_threads, before)
        while not self._stop_event.wait(self._tick):
            now = time.monotonic()
            # The process or the whole machine was suspended in the meantime.
            if now - before > 4 * self._tick + 2:
                progress.skip(now - before)
            before = now
            own = self.publish(progress.idle(now))
            if (rank_lines := self._find_stall(own, now)) is not None:
                self._end(own, rank_lines)

    def publish(self, idle: float) -> dict[str, Any]:
        """Write a heartbeat to the store, and return it.

        Args:
            idle: Seconds without progress of this rank.
        """
        self._beats += 1
        position = record.here.position
        # Reading the stacks takes time, so only if this rank may be the cause.
        may_be_cause = idle > self._limit / 2 and not position.collective
        status = {
            "beat": self._beats,
            "idle": idle,
            "is_with_others": position.is_with_others,
            "position": str(position),
            "code": stacks.own_code(exclude=self) if may_be_cause else None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "without": sorted(self._ignored_threads),
        }
        if self._store is not None:
            self._store.put(str(self._rank), status)
        return status

    def _find_stall(self, own: dict[str, Any], now: float) -> list[str] | None:
        """Return a line for each group of ranks if none makes progress.

        The first rank to find it lets the others know.
        """
        if own["idle"] < self._limit / 2:
            return None
        is_over = own["idle"] > self._limit
        if self._store is None:
            # A rank that waits in a collective cannot know whether the others work. So
            # only a rank that is idle in the user's code, in a fit, ends the job.
            return [] if is_over and own["is_with_others"] and own["code"] else None
        if isinstance(lines := self._store.get(_STALLED), list):
            return [str(line) for line in lines]
        statuses = self._read_statuses()
        # All, also behind one that works: silence is counted from the first look.
        are_idle = [self._is_idle(rank, s, now) for rank, s in statuses.items()]
        are_with_others = [s["is_with_others"] for s in (own, *statuses.values()) if s]
        if not is_over or not all(are_idle) or not any(are_with_others):
            return None
        lines = self._describe({**statuses, self._rank: own}, now)
        self._store.put(_STALLED, lines)
        return lines

    def _read_statuses(self) -> dict[int, dict[str, Any] | None]:
        """Return the heartbeat of each other rank; by one request where possible."""
        assert self._store is not None
        found, statuses = self._store.get_all(""), {}
        for rank in set(range(self._size)) - {self._rank}:
            name = str(rank)
            status = self._store.get(name) if found is None else found.get(name)
            statuses[rank] = status if isinstance(status, dict) else None
        return statuses

    def _describe(
        self, statuses: Mapping[int, dict[str, Any] | None], now: float
    ) -> list[str]:
        """Return a line for each missing rank, and for each position of the waiting."""
        missing: dict[str, list[int]] = {}
        waiting: dict[str, list[int]] = {}
        for rank, status in sorted(statuses.items()):
            if status is None or self._is_silent(rank, status, now):
                missing.setdefault("it does not answer", []).append(rank)
            elif status["code"]:
                position = f"{status['position']}, {status['code']}"
                missing.setdefault(position, []).append(rank)
            else:
                waiting.setdefault(status["position"], []).append(rank)
        lines = [
            f"{ranks_in_words(ranks).capitalize()} {'is' if len(ranks) == 1 else 'are'}"
            f"{_MISSING}{position}."
            for position, ranks in missing.items()
        ]
        for position, ranks in waiting.items():
            lines.append(f"Waiting {position}: {ranks_in_words(ranks)}.")
        return lines

    def _is_idle(self, rank: int, status: dict[str, Any] | None, now: float) -> bool:
        """Return whether another rank makes no progress, by its heartbeats."""
        if status is None:  # it has not begun
            return False
        beat, _, before = self._seen.get(rank, (-1, 0.0, {}))
        now_used: Usage = {}
        if is_here := status["host"] == socket.gethostname():
            now_used = used(status["pid"], ignored_threads=status["without"])
        if status["beat"] != beat:
            self._seen[rank] = status["beat"], now, now_used
        # No new heartbeat: the process is suspended, has ended, or works in a library
        # that keeps the GIL so that its watchdog cannot run.
        elif is_here and is_work(growth(before, now_used), now - self._seen[rank][1]):
            self._seen[rank] = beat, now, now_used
            return False
        # Or it is about to send one, and was idle when it sent the last one.
        is_idle = status["idle"] > _ALMOST * self._limit
        return bool(is_idle or self._is_silent(rank, status, now))

    def _is_silent(self, rank: int, status: dict[str, Any], now: float) -> bool:
        beat, since, _ = self._seen.get(rank, (-1, 0.0, {}))
        return bool(status["beat"] == beat and now - since > _SILENT * self._limit)

    def _end(self, own: dict[str, Any], rank_lines: list[str]) -> None:
        """Print where every rank is and the stacks of this one, and exit."""
        message = f"no rank has made progress for {self._limit:g} s"
        lines = [
            f"keras_dist: {message}, and the job ends. Rank {self._rank} is "
            f"{own['position']}: {own['code'] or 'it waits there'}.",
            *rank_lines,
            stacks.text(exclude=self),
            "If the ranks were working, raise the limit: "
            f"{VARIABLE}=600, or 0 for no limit.",
        ]
        text = "\n".join(lines) + "\n"
        os.write(2, text.encode(errors="replace"))
        # A rank that is in the user's code while others wait for it is the cause.
        is_secondary = not own["code"] and any(_MISSING in line for line in rank_lines)
        rank_process.write_report(
            "Stalled", message, text, is_secondary=is_secondary, code=EXIT_CODE
        )
        sys.stdout.flush()
        time.sleep(2 * self._tick + 1)  # until the other ranks have printed, too
        os._exit(EXIT_CODE)


class Progress:
    """How long this rank has made no progress.

    Progress is: the record has changed, or the process has computed, read or written.

    Args:
        ignored_threads: Ids of threads whose work does not count.
        now: The time, as of `time.monotonic`.
    """

    def __init__(self, ignored_threads: Collection[int], now: float) -> None:
        self._ignored_threads = ignored_threads
        self._last = now
        self._usage = used(ignored_threads=ignored_threads)
        self._sum = (0.0, 0)
        self._changes = -1

    def idle(self, now: float) -> float:
        """Seconds without progress; must be called at short intervals."""
        now_used = used(ignored_threads=self._ignored_threads)
        seconds, size = growth(self._usage, now_used)
        self._usage = now_used
        self._sum = self._sum[0] + seconds, self._sum[1] + size
        changes = record.here.position.changes
        if changes != self._changes or is_work(self._sum, now - self._last):
            self._last, self._changes, self._sum = now, changes, (0.0, 0)
        return now - self._last

    def skip(self, seconds: float) -> None:
        """Do not count a time in which this process was suspended."""
        self._last += seconds


def is_work(grown: tuple[float, int], elapsed: float) -> bool:
    """Return whether a process has worked, or has only polled while it waited.

    Args:
        grown: CPU time in seconds, and bytes read and written.
        elapsed: Seconds in which it has used them.

    >>> is_work((0.2, 0), 60.0), is_work((6.0, 0), 60.0), is_work((0.0, 2**21), 9.0)
    (False, True, True)
    """
    is_computing = grown[0] > _IDLE_SECONDS + _IDLE_FRACTION * elapsed
    return is_computing or grown[1] > _IDLE_BYTES + _IDLE_RATE * elapsed


def threads(pid: int | None = None) -> set[int]:
    """Ids of all threads of a process, by default of this one; Linux only."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid or 'self'}/task")}
    except OSError:
        return set()


def used(pid: int | None = None, *, ignored_threads: Collection[int] = ()) -> Usage:
    """CPU time and bytes that a process and its children have used so far.

    Args:
        pid: Id of the process; by default this one.
        ignored_threads: Ids of threads that are left out.
    """
    usage: Usage = {}
    for thread in threads(pid) - set(ignored_threads):
        folder = Path(f"/proc/{pid or 'self'}/task/{thread}")
        try:
            # The name in parentheses may contain spaces: split only what follows it.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the thread has just ended
            continue
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS
        usage[thread] = seconds, _bytes(folder)
        for child in _children(folder):
            usage |= used(child)
    return usage


def growth(before: Usage, after: Usage) -> tuple[float, int]:
    """Seconds and bytes used in between, without threads that have ended since.

    >>> growth({1: (1.0, 10), 2: (5.0, 0)}, {1: (1.5, 30), 3: (0.25, 0)})
    (0.75, 20)
    """
    pairs = [(before.get(thread, (0.0, 0)), now) for thread, now in after.items()]
    seconds = sum(max(0.0, now[0] - then[0]) for then, now in pairs)
    return seconds, sum(max(0, now[1] - then[1]) for then, now in pairs)


def _bytes(folder: Path) -> int:
    try:
        lines = (folder / "io").read_text().split()
    except OSError:
        return 0
    return int(lines[1]) + int(lines[3])  # rchar: …, wchar: …


def _children(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "children").read_text().split()]
    except OSError:
        return []


_watchdog: list[Watchdog] = []


def limit_of(argument: float | None = None) -> float:
    """Seconds without progress after which the job ends; 0 for no limit.

    Args:
        argument: The limit that the user passed; by default that of the environment
            variable `KERAS_DIST_STALL_SECONDS`, else 120.

    Raises:
        ValueError: If the limit is not a number, or negative.
    """
    value = os.environ.get(VARIABLE, DEFAULT_LIMIT) if argument is None else argument
    try:
        limit = float(value)
    except (TypeError, ValueError):
        limit = -1.0
    if not limit >= 0:
        raise ValueError(
            "The limit for ranks without progress must be a number of seconds, or 0 "
            f"for none. Received: {value!r}. Set it with {VARIABLE} or `stall_limit`."
        )
    return limit


def set_limit(argument: float | None) -> None:
    """Set the limit to what the user passed, before `start`; `None` changes nothing."""
    if argument is not None:
        os.environ[VARIABLE] = str(limit_of(argument))


def start(*, rank: int, size: int, ignored_threads: Collection[int]) -> None:
    """Watch this rank and note what ends it; do nothing if there is no other rank.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        ignored_threads: Ids of Horovod's threads.
    """
    if size == 1:
        return
    note_end(rank)
    limit = limit_of()
    if limit and not _watchdog:
        watchdog = Watchdog(
            rank=rank,
            size=size,
            limit=limit,
            ignored_threads=ignored_threads,
            store=client_of(),
        )
        _watchdog.append(watchdog)
        # At once, before anything can happen to this rank: the others do not count a
        # rank as idle before its first heartbeat.
        watchdog.publish(0.0)
        watchdog.start()
        atexit.register(watchdog.stop)
