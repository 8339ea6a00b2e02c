"""What the first host orders one that takes part, and whether it is still there."""

from typing import Any

from keras_dist.launch.heartbeat import LOST_SECONDS, Heartbeat
from keras_dist.launch.host_store import NONCE, HostStore

# How often what must arrive is sent until the store takes it.
_ATTEMPTS = 5


class Orders:
    """The orders for one host, and its answers.

    Args:
        store: The store of the job, as this host reaches it.
        name: Id of this host.
    """

    def __init__(self, store: HostStore, name: str) -> None:
        self._store, self._name = store, name
        self._is_lost = self._is_replaced = False
        self._nonce = None

    def begin(self) -> None:
        """Send heartbeats from now on, and remember which job this is."""
        self._nonce = self._store.get(NONCE)
        Heartbeat(self._store, self._name, self._lose).start()

    def now(self) -> dict[str, Any]:
        """What the first host orders now; empty for nothing."""
        order = self._store.get(f"order.{self._name}")
        if order is None:
            nonce = self._store.get(NONCE)
            self._is_replaced = nonce not in (None, self._nonce)
        return order or {}

    def answer(self, kind: str, value: Any) -> None:
        """Write what the first host waits for: its store may be busy."""
        name = f"{kind}.{self._name}"
        any(self._store.put(name, value) for _ in range(_ATTEMPTS))

    @property
    def is_over(self) -> bool:
        """Whether no more orders come: the first host, or its job, is gone."""
        return self._is_lost or self._is_replaced

    def check(self) -> None:
        """Check that there is a first host to wait for.

        Raises:
            ValueError: If it was lost, or has another job.
        """
        meeting = f"{self._store.address}:{self._store.port}"
        if self._is_lost:
            raise ValueError(
                "The first host was lost, and the job ends with it. Received: no "
                f"answer from {meeting} since {LOST_SECONDS:g} s. Start the same "
                "command on all hosts again; with `resume=` it goes on."
            )
        if self._is_replaced:
            raise ValueError(
                "The command of the first host was started again, and the job that it "
                f"had before has ended. Received: another job at {meeting}. Start the "
                "same command here again; with `resume=` it goes on."
            )

    def _lose(self) -> None:
        self._is_lost = True
