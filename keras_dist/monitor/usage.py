"""How much a process works: the time of the processor and the bytes of its threads."""

import os
from collections.abc import Collection
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")

# Seconds of the processor and bytes read or written, by thread.
Usage = dict[int, tuple[float, int]]


def threads(pid: int | None = None) -> set[int]:
    """Numbers of all threads of a process, by default of this one; Linux only."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid or 'self'}/task")}
    except OSError:
        return set()


def used(pid: int | None = None, *, without: Collection[int] = ()) -> Usage:
    """What the threads of a process, and its children, have used so far.

    Args:
        pid: The process, by default this one.
        without: Threads that do not count.
    """
    found: Usage = {}
    for thread in threads(pid) - set(without):
        folder = Path(f"/proc/{pid or 'self'}/task/{thread}")
        try:
            # The name in brackets may hold spaces: count behind it.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS
        found[thread] = seconds, _bytes(folder)
        for child in _children(folder):
            found |= used(child)
    return found


def growth(before: Usage, after: Usage) -> tuple[float, int]:
    """Seconds and bytes used in between; threads that have ended meanwhile count not.

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
