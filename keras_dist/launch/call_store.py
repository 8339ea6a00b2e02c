"""The store of a job whose workers another system starts, on the driver's host."""

import secrets
import socket
from collections.abc import Mapping
from typing import Any

from keras_dist.launch.assignment import seed_of
from keras_dist.launch.monitor.status_store import status_store_of
from keras_dist.launch.rendezvous import Store, variables_of


class CallStore:
    """The store of one start, and what the agents need of it.

    Args:
        address: Address or name of this host, by which the workers reach it.
        restart: Number of the restart; 0 in the first start.
        environment: Variables of all ranks.

    Raises:
        ValueError: If the store cannot listen at the address.
    """

    def __init__(
        self, address: str, restart: int, environment: Mapping[str, str]
    ) -> None:
        self._restart, self._environment = restart, dict(environment)
        self._secret, self._job = secrets.token_hex(16), secrets.token_hex(8)
        try:
            address = self._address = socket.gethostbyname(address)
            self._server = Store(address)
        except OSError as error:
            raise ValueError(
                "The workers have to reach the store of the job on the driver's host. "
                f"Received: the address {address}, where it cannot listen ({error})."
            ) from error
        self._server.open([], self._secret)
        self._variables = variables_of(address, self._server.port, self._secret)
        store = status_store_of(self._variables)
        assert store is not None
        self.store = store

    def header(self) -> dict[str, Any]:
        """What each agent needs of this job; with its secret."""
        return {
            "store": self._variables,
            "secret": self._secret,
            "job": self._job,
            "seed": seed_of(self._job),
            "address": self._address,
            "restart": self._restart,
            "environment": self._environment,
        }

    def close(self) -> None:
        """End the store."""
        self._server.close()
