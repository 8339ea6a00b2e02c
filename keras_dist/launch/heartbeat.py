"""Heartbeats of the agents, by which a host that is lost is noticed on both sides."""

import threading
import time
from collections.abc import Callable, Sequence

from keras_dist.launch.failures import LOST_SECONDS
from keras_dist.launch.store import StoreClient

# Seconds between two heartbeats, and between two looks at them.
_BEAT_SECONDS, _LOOK_SECONDS = 1.0, 0.5

# Between two looks at the heartbeats; more means that this machine was suspended.
_LONGEST_LOOK = 5.0


class Heartbeat(threading.Thread):
    """In an agent: writes heartbeats to the store.

    Args:
        store: The store of the job.
        name: Id of the agent.
        on_lost: Called once if the store was out of reach for 15 s.
    """

    def __init__(
        self, store: StoreClient, name: str, on_lost: Callable[[], None]
    ) -> None:
        super().__init__(name="keras_dist.heartbeat", daemon=True)
        self._store, self._host, self._on_lost = store, name, on_lost

    def run(self) -> None:
        last, beats = time.monotonic(), 0
        while True:
            begin, beats = time.monotonic(), beats + 1
            if begin - last > LOST_SECONDS + _LONGEST_LOOK:
                last = begin  # this host was suspended
            if self._store.put(_name(self._host), beats):
                last = time.monotonic()
            elif time.monotonic() - last > LOST_SECONDS:
                self._on_lost()
                return
            time.sleep(_BEAT_SECONDS)


class Presence:
    """In the launcher: when each agent's last heartbeat was seen.

    Args:
        store: The store of the job.
    """

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._begin = self._looked = time.monotonic()
        # For each agent that has answered: its last heartbeat, and when it was seen.
        self._seen: dict[str, tuple[int, float]] = {}
        self._has_warned = False

    def look(self, running: Sequence[str]) -> None:
        """Read the heartbeats of agents that run, twice a second."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        pause = now - self._looked
        if pause > _LONGEST_LOOK:
            self._seen = {k: (n, t + pause) for k, (n, t) in self._seen.items()}
        self._looked = now
        found = self._store.get_all(_name("")) or {}  # one request, however many hosts
        for number in running:
            beats = found.get(_name(number))
            if beats is not None and self._seen.get(number, (0, 0.0))[0] != beats:
                self._seen[number] = beats, now

    def lost(self, running: Sequence[str], seconds: float = LOST_SECONDS) -> list[str]:
        """Return the agents that run, as far as is known, but were silent so long."""
        return [
            number
            for number in running
            if number in self._seen and self._looked - self._seen[number][1] > seconds
        ]

    def late(self, running: Sequence[str]) -> list[str]:
        """Return, once, the agents that have not answered 15 s after the start."""
        if self._has_warned or time.monotonic() - self._begin < LOST_SECONDS:
            return []
        self._has_warned = True
        return [number for number in running if number not in self._seen]


def _name(name: str) -> str:
    return f"beat.{name}"
