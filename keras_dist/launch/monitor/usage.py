"""CPU time and bytes of input and output that a process has used, by thread."""

import os
from collections.abc import Collection
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")

# For each thread: CPU time in seconds, and bytes read and written.
Usage = dict[int, tuple[float, int]]


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
