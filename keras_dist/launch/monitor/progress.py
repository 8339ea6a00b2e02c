"""Distinguish a process that works from one that only waits, by what it uses.

CPU time and bytes are read for each thread (Linux), since Horovod's threads, which poll
all the time, do not count; `psutil` has bytes for whole processes alone.
"""

import os
from collections.abc import Collection
from pathlib import Path

from keras_dist.launch.monitor import record

_TICKS = os.sysconf("SC_CLK_TCK")

# For each thread: CPU time in seconds, and bytes read and written.
Usage = dict[int, tuple[float, int]]

# A process that waits still uses a little CPU time and reads a few bytes, in threads
# that wake up to poll. Up to these limits it counts as idle. They are so low that a
# process which works is above them even if many processes share the core.
_IDLE_FRACTION = 0.02
_IDLE_SECONDS = 0.05
_IDLE_BYTES, _IDLE_RATE = 2**20, 50e3


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
