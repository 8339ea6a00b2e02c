"""What every environment answers."""

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from signal import Signals
from typing import ClassVar, Self


class Environment(ABC):
    """What a scheduler says of a job in its variables.

    It starts the same command on each host; `num_hosts`, `host_number` and `first_host`
    say where they meet.
    """

    name: ClassVar[str]

    # The port of the store on the first host.
    port: int = 29400

    # How few hosts are enough; `None` for all of them.
    min_hosts: int | None = None

    # Ranks of this host; `None` for one for each GPU, or one.
    num_ranks: int | None = None

    # Whether all hosts print to one screen.
    is_quiet: bool = False

    # Exit code when all ranks have saved at a signal; `None` for that of the signal.
    saved_code: int | None = None

    # Signals that stop the job beside Ctrl-C, SIGTERM and SIGHUP.
    signals: Sequence[Signals] = ()

    @classmethod
    @abstractmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the environment if its variables are there.

        Args:
            environ: Environment variables.

        Raises:
            ValueError: If they are there, and cannot be used.
        """

    @property
    @abstractmethod
    def num_hosts(self) -> int:
        """Number of hosts, at most."""

    @property
    @abstractmethod
    def host_number(self) -> int | None:
        """Number of this host, from 0; `None` to be numbered as it comes."""

    @property
    @abstractmethod
    def first_host(self) -> str:
        """Name or address of the first host."""

    @property
    def host_name(self) -> str:
        """Name of this host, for messages."""
        return socket.gethostname()

    @property
    def host_names(self) -> Sequence[str]:
        """Names of all hosts by their numbers, if they are known."""
        return ()
