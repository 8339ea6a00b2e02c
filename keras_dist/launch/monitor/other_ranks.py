"""What a rank knows of the others by their heartbeats, and which rank looks at all."""

import socket
from collections.abc import Iterator
from typing import Any

from keras_dist.launch.hosts import ranges
from keras_dist.launch.monitor import usage
from keras_dist.launch.monitor.progress import is_work
from keras_dist.launch.store import StoreClient

# Names in the store, beside the heartbeats, whose names are the numbers of the ranks:
# the rank that looks at all others, and what it has found when none makes progress.
_OBSERVER, _STALLED = "observer", "stalled"

# Another rank counts as idle after this fraction of the limit, since the last progress
# of all may have been noticed a little later there.
_ALMOST = 0.8

# A rank has no heartbeat after this fraction of the limit without a new one.
_SILENT = 0.25


class OtherRanks:
    """The heartbeats of the other ranks.

    One idle rank looks at all, the observer; or the requests of N ranks would grow with
    the square of N.

    Args:
        store: The store in which the ranks keep their heartbeats.
        rank: Rank of this process.
        size: Number of ranks.
        limit: The stall limit, in seconds.
    """

    def __init__(
        self, store: StoreClient, *, rank: int, size: int, limit: float
    ) -> None:
        self._store, self._rank, self._size, self._limit = store, rank, size, limit
        # For each other rank: its last heartbeat, when that was first seen, and what
        # the process had used by then.
        self._seen: dict[int, tuple[int, float, usage.Usage]] = {}
        # What the last observer wrote last, and when that was first seen.
        self._observer: tuple[Any, float] = (None, 0.0)
        self._beats = 0
        self._looks = 0

    def publish(self, status: dict[str, Any]) -> None:
        """Write this rank's heartbeat."""
        self._store.put(str(self._rank), status)

    def observes(self, now: float) -> bool:
        """Whether this rank, which is idle, is the one that looks at all others.

        It is the first one to be idle. If it makes progress, or has no heartbeat, one
        of the smallest numbers takes its place: a rank of k binary digits waits for k
        more looks.

        Args:
            now: The time, as of `time.monotonic`.
        """
        found = self._store.get(_OBSERVER)
        if not isinstance(found, dict) or found.get("rank") != self._rank:
            if found != self._observer[0]:
                self._observer, self._looks = (found, now), 0
            is_there = now - self._observer[1] <= _SILENT * self._limit
            if found is not None and is_there:
                return False
            self._looks += 1
            if self._looks <= self._rank.bit_length():
                return False
        self._beats += 1
        self._store.put(_OBSERVER, {"rank": self._rank, "beat": self._beats})
        return True

    def are_idle(self, now: float) -> tuple[bool, bool]:
        """Whether no other rank makes progress, and one of them is in a fit.

        Args:
            now: The time, as of `time.monotonic`.
        """
        are_idle, is_any_with_others = True, False
        # All, also behind one that works: silence is counted from the first look.
        for rank, status in self._statuses():
            if status is None or not self._is_idle(rank, status, now):
                are_idle = False
            else:
                is_any_with_others |= bool(status["is_with_others"])
        return are_idle, is_any_with_others

    def announced(self) -> list[str] | None:
        """What the observer has announced: a line for each group of ranks."""
        lines = self._store.get(_STALLED)
        return [str(line) for line in lines] if isinstance(lines, list) else None

    def announce(self, own: dict[str, Any], now: float) -> list[str]:
        """Announce that no rank makes progress.

        Args:
            own: The status of this rank.
            now: The time, as of `time.monotonic`.

        Returns:
            A line for each missing rank, and for each position in which ranks wait.
        """
        statuses = {self._rank: own, **dict(self._statuses())}
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
        lines = []
        for position, ranks in missing.items():
            found = f"Rank {ranks[0]} is missing"
            if len(ranks) > 1:
                found = f"{_named(ranks)} are missing"
            lines.append(f"{found}: {position}.")
        for position, ranks in waiting.items():
            lines.append(f"Waiting {position}: {_named(ranks).lower()}.")
        self._store.put(_STALLED, lines)
        return lines

    def _statuses(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """The heartbeat of each other rank; by one request where the store can."""
        found = self._store.get_all("")
        for rank in range(self._size):
            if rank != self._rank:
                name = str(rank)
                status = self._store.get(name) if found is None else found.get(name)
                yield rank, status if isinstance(status, dict) else None

    def _is_idle(self, rank: int, status: dict[str, Any], now: float) -> bool:
        """Whether another rank makes no progress, by its heartbeats."""
        beat, since, before = self._seen.get(rank, (-1, 0.0, {}))
        is_here = status["host"] == socket.gethostname()
        used: usage.Usage = {}
        if is_here:
            used = usage.used(status["pid"], ignored_threads=status["without"])
        if status["beat"] == beat:
            # No new heartbeat: the process is suspended, has ended, or works in a
            # library that keeps the GIL so that its watchdog cannot run.
            if is_here and is_work(usage.growth(before, used), now - since):
                self._seen[rank] = beat, now, used
                return False
            # Or it is about to send one, and was idle when it sent the last one.
            is_silent = now - since > _SILENT * self._limit
            return is_silent or bool(status["idle"] > _ALMOST * self._limit)
        self._seen[rank] = status["beat"], now, used
        return bool(status["idle"] > _ALMOST * self._limit)

    def _is_silent(self, rank: int, status: dict[str, Any], now: float) -> bool:
        beat, since, _ = self._seen.get(rank, (-1, 0.0, {}))
        return bool(status["beat"] == beat and now - since > _SILENT * self._limit)


def _named(ranks: list[int]) -> str:
    return f"Rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
