"""What a launcher's class answers: whether it started this process, and its place."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

# Where rank 0 is to serve a meeting, instead of where the launcher says, if it does.
MEETING = "KERAS_DIST_RDZV"


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and where the ranks of its job meet.

    Args:
        launcher: Name of the launcher, for messages.
        rank: Number of this process, from 0 to `size` − 1.
        size: Number of ranks.
        local_rank: Number of this process on its host, from 0.
        local_size: Number of ranks on this host.
        address: Name or address of rank 0's host, where rank 0 is to serve Horovod's
            rendezvous; empty if the launcher connects the ranks.
        port: Port of the rendezvous; 0 if the launcher connects the ranks.
        variables: The launcher's variables, for messages.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0
    variables: Sequence[str] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        is_rank = 0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size
        if not is_rank or self.port >= 2**16:
            raise ValueError(
                f"The numbers that {self.launcher} gave to this process cannot be "
                f"right. Received: rank {self.rank} of {self.size}, rank "
                f"{self.local_rank} of {self.local_size} on its host, port "
                f"{self.port}, from {', '.join(self.variables)}."
            )

    @property
    def job(self) -> str:
        """A text that all ranks of the job have."""
        return f"{self.launcher} {self.address}:{self.port}"


class Cluster(ABC):
    """A launcher that starts ranks and describes them by environment variables.

    Attributes:
        name: For messages.
        key: For `KERAS_DIST_CLUSTER`.
    """

    name: ClassVar[str]
    key: ClassVar[str]

    @abstractmethod
    def is_here(self, environ: Mapping[str, str]) -> bool:
        """Return True if this launcher started the process as one of several ranks."""

    @abstractmethod
    def place(self, environ: Mapping[str, str]) -> Place:
        """Return the place of this process.

        Raises:
            ValueError: If a variable is missing or is no number.
        """


def read_text(
    environ: Mapping[str, str], name: str, launcher: str, form: str = ".+"
) -> str:
    """Return what a variable of a launcher holds, in a form of `re`.

    Raises:
        ValueError: If the variable is missing, or holds something else.
    """
    value = environ.get(name, "")
    if not re.fullmatch(form, value):
        raise ValueError(
            f"{launcher} has not described this process completely. Received: "
            f"{name}={value or 'nothing'}. Start all ranks by {launcher}, or unset its "
            "other variables to train on one process."
        )
    return value


def read_number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    """Return the number in a variable of a launcher; see `read_text`."""
    return int(read_text(environ, name, launcher, r"\d+"))


def add_meeting(place: Place, environ: Mapping[str, str]) -> Place:
    """Return a place with the address and the port in `KERAS_DIST_RDZV`."""
    meeting = read_text(environ, MEETING, place.launcher, r"[^:]+:\d+")
    address, _, port = meeting.partition(":")
    variables = (*place.variables, MEETING)
    return replace(place, address=address, port=int(port), variables=variables)
