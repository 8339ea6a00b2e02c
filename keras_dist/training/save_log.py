"""What the first rank has saved, in the launcher's store, where other ranks read it."""

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from keras_dist.comm import World
from keras_dist.launch import monitor

# The name of the log in the store, and how many saves it keeps.
_NAME, _SAVES = "saves", 64

# How long a rank waits for the first rank to begin a save, and to finish one. After
# that it writes by itself.
_BEGIN_SECONDS, _WRITE_SECONDS = 5.0, 600.0

# The interval between two looks into the store grows from the first to the second.
# Of all ranks together there are at most so many a second.
_SHORTEST, _LONGEST, _LOOKS = 0.01, 0.25, 400.0


class SaveLog:
    """Which saves this rank has reached, on any rank but the first.

    A save is known by its name (what saves, after how many updates, and to which path),
    the interval between two fits in which it is made, and its number among saves of the
    same name. So a file that the first rank has written before is not taken for the one
    that it is about to write.

    Args:
        store: The launcher's store; `None` if it has none.
        size: Number of ranks.
    """

    def __init__(self, store: monitor.StatusStore | None, size: int = 1) -> None:
        self._store = store
        self._longest = max(_LONGEST, size / _LOOKS)
        self._interval = 0
        self._numbers: dict[str, int] = {}

    @staticmethod
    def of(world: World) -> "SaveLog":
        """The log of this rank."""
        store = monitor.status_store_of()
        return FirstRankLog(store) if world.is_first else SaveLog(store, world.size)

    @property
    def has_store(self) -> bool:
        """Whether the ranks can read what the first one announces."""
        return self._store is not None

    def begin_interval(self) -> None:
        """All ranks come here alike: from now on saves are counted anew."""
        self._interval += 1
        self._numbers.clear()

    def end(self) -> None:
        """This process ends."""

    def has(self, name: str, path: str) -> bool:
        """Wait until the first rank has made the same save; whether its file is here.

        Args:
            name: Of the save, the same on all ranks.
            path: Of the file or folder; an address if it is not a local one.
        """
        key, number = self._count(name)
        total = sum(self._numbers.values())
        # Long before the watchdog may think that nobody works.
        begin_seconds = min(_BEGIN_SECONDS, (monitor.limit_of() or 120.0) / 4)
        start, pause = time.monotonic(), _SHORTEST
        while self._store is not None:
            log = self._store.get(_NAME) or {}
            save = log.get("saves", {}).get(key, {"number": 0})
            has_begun = save["number"] >= number
            if has_begun and save["state"] == "failed":
                return False  # this rank tries, and has its own error
            if has_begun and save["state"] == "written":
                return _is_here(path, save)
            # The first rank has gone on, and not by way of this save.
            position = log.get("interval", 0), log.get("total", 0)
            limit = _WRITE_SECONDS if has_begun else begin_seconds
            is_past = not has_begun and position >= (self._interval, total)
            if is_past or time.monotonic() - start > limit:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, self._longest)
        return False

    def _count(self, name: str) -> tuple[str, int]:
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        return f"{self._interval} {name}", number


class FirstRankLog(SaveLog):
    """The log of the first rank, which it puts into the store."""

    def __init__(self, store: monitor.StatusStore | None) -> None:
        super().__init__(store)
        self._saves: dict[str, dict[str, Any]] = {}

    def begin_interval(self) -> None:
        super().begin_interval()
        self._publish()

    def end(self) -> None:
        self._interval = sys.maxsize
        self._publish()

    def written(self, name: str, path: str, write: Callable[[], Any]) -> Any:
        """Make a save, and announce its beginning and its end.

        Args:
            name: Of the save, the same on all ranks.
            path: Of the file or folder; an address if it is not a local one.
            write: Makes the file.

        Returns:
            What `write` returns.
        """
        key, number = self._count(name)
        self._saves.pop(key, None)  # the newest is the last one
        self._saves[key] = {"number": number, "state": "writing"}
        for old in list(self._saves)[:-_SAVES]:
            del self._saves[old]
        self._publish()
        state = "failed"
        try:
            result = write()
            state = "written"
        finally:
            self._saves[key] = {"number": number, "state": state, **_found(path)}
            self._publish()
        return result

    def _publish(self) -> None:
        if self._store is not None:
            log = {
                "interval": self._interval,
                "total": sum(self._numbers.values()),
                "saves": self._saves,
            }
            self._store.put(_NAME, log)


def _found(path: str) -> dict[str, Any]:
    """What says, on another host, whether it sees the same file."""
    try:
        found = os.stat(path)
    except OSError:
        return {"host": socket.gethostname(), "stat": None}
    return {
        "host": socket.gethostname(),
        "stat": [found.st_size, found.st_mtime_ns],
    }


def _is_here(path: str, save: dict[str, Any]) -> bool:
    """Whether what the first rank has written can be seen from this host."""
    here = _found(path)
    if save["host"] == here["host"]:
        return "://" in path or here["stat"] is not None
    return bool(save["stat"] == here["stat"])
