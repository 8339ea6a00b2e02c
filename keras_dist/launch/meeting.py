"""Where the hosts of a job meet: what the user, or SLURM, has said of it."""

import os
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import Signals

from keras_dist.launch.assignment import SECRET
from keras_dist.launch.elastic import SETTLE_SECONDS
from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import check_host
from keras_dist.launch.members import nnodes_text

TIMEOUT_SECONDS = 300.0
_SHORTEST_SECRET = 16


@dataclass(frozen=True)
class Meeting:
    """Where the hosts of a job meet, and who this one is.

    Args:
        address: Name or address of the first host.
        port: Port of its store.
        num_hosts: How many hosts the job has, at most.
        num_ranks: How many ranks this host starts.
        secret: Secret of the job.
        number: Number of this host; `None` to be numbered as it comes. Number 0 is the
            first host. Without a number it is the one that has the address.
        timeout: Seconds to wait for the others.
        host: Name of this host.
        names: Names of all hosts, if they are known.
        is_quiet: Whether all hosts print to one screen.
        saved_code: As of `Plan`.
        has_munge: Whether the first host passes the secret by munge.
        signals: Signals that stop the job beside Ctrl-C, SIGTERM and SIGHUP.
        min_hosts: How many hosts the job has, at least; `None` for as many as at most.
        has_tls: Whether the others reach the store by TLS.
        has_spares: Whether this host keeps processes for the next start.
    """

    address: str
    port: int
    num_hosts: int
    num_ranks: int
    secret: str
    number: int | None = None
    timeout: float = TIMEOUT_SECONDS
    host: str = socket.gethostname()
    names: Sequence[str] = ()
    is_quiet: bool = False
    saved_code: int | None = None
    has_munge: bool = False
    signals: Sequence[Signals] = ()
    min_hosts: int | None = None
    has_tls: bool = False
    has_spares: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may come and go."""
        return self.min_hosts not in (None, self.num_hosts)


@dataclass(frozen=True)
class Plan:
    """What the first host was asked for.

    Args:
        num_hosts: Number of hosts, at most.
        restarts: The largest number of restarts.
        timeout: Seconds to wait for enough hosts.
        meeting: Where the others find the store, in words.
        names: Names of all hosts, if they are known.
        saved_code: Exit code when a signal has stopped the job and all ranks have
            saved; `None` for that of the signal.
        min_hosts: Number of hosts, at least; `None` for as many as at most.
        settle: Seconds for which a job that has enough hosts waits for one more.
    """

    num_hosts: int
    restarts: int
    timeout: float
    meeting: str
    names: Sequence[str] = ()
    saved_code: int | None = None
    min_hosts: int | None = None
    settle: float = SETTLE_SECONDS

    @property
    def least(self) -> int:
        """Number of hosts, at least."""
        return self.num_hosts if self.min_hosts is None else self.min_hosts

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may come and go."""
        return self.least < self.num_hosts


def check(meeting: Meeting, restarts: int) -> None:
    """Check what the user has asked for.

    Raises:
        ValueError: If it cannot be used.
    """
    number = meeting.number
    least = meeting.num_hosts if meeting.min_hosts is None else meeting.min_hosts
    has_hosts = 1 <= least <= meeting.num_hosts
    if meeting.num_ranks < 1 or not has_hosts or restarts < 0:
        raise ValueError(
            "At least one host and one rank are needed, and no negative number of "
            "restarts. Received: --nnodes "
            f"{nnodes_text(meeting.min_hosts, meeting.num_hosts)} -np "
            f"{meeting.num_ranks} --restarts {restarts}"
        )
    if number is not None and not 0 <= number < meeting.num_hosts:
        raise ValueError(
            "Hosts are numbered from 0 to one less than `--nnodes`. Received: "
            f"--node-rank {number} --nnodes "
            f"{nnodes_text(meeting.min_hosts, meeting.num_hosts)}"
        )
    by_munge = meeting.has_munge and not meeting.has_tls
    is_open = not (is_loopback(meeting.address) or by_munge)
    if len(meeting.secret) < _SHORTEST_SECRET and is_open:
        received = f"{len(meeting.secret)} characters" if meeting.secret else "none"
        raise ValueError(
            "A job on several hosts needs a secret of at least "
            f"{_SHORTEST_SECRET} characters. Received: {received}. Set {SECRET} to "
            "the same value on all hosts, as from `openssl rand -hex 16`, or name a "
            "file with it by `--secret-file`."
        )


def secret_in(path: str | None, environ: Mapping[str, str] | None = None) -> str:
    """The secret of the job: from a file if there is one, else from the environment.

    Args:
        path: Path of the file, of which line ends do not count; `None` for none.
        environ: Environment variables; by default those of this process.

    Raises:
        OSError: If the file cannot be read.
    """
    if path is not None:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRGRP | stat.S_IROTH):
                print_message(
                    "keras-dist: other users of this machine may read the job's "
                    f"secret. Received: --secret-file {path} with mode "
                    f"{stat.S_IMODE(mode):o}. Call: chmod 600 {path}"
                )
            return file.read().strip()
    return (os.environ if environ is None else environ).get(SECRET, "")


def meeting_point(text: str) -> tuple[str, int]:
    """Address and port of `--rdzv`.

    >>> meeting_point("a:29400"), meeting_point("a")
    (('a', 29400), ('a', 29400))

    Raises:
        ValueError: If it has another form.
    """
    address, _, port = text.partition(":")
    if not address or not (port or "29400").isdecimal() or text.endswith(":"):
        raise ValueError(
            "The hosts meet at the first one: its name or address, and a port. "
            f"Received: --rdzv {text}. For example: --rdzv a:29400"
        )
    check_host(address, source=f"--rdzv {text}")
    return address, int(port or "29400")


def host_range(text: str) -> tuple[int, int]:
    """The smallest and the largest number of hosts of `--nnodes`.

    >>> host_range("3"), host_range("2:4")
    ((3, 3), (2, 4))

    Raises:
        ValueError: If it has another form.
    """
    least, has_range, most = text.partition(":")
    if not least.isdecimal() or (has_range and not most.isdecimal()):
        raise ValueError(
            "A number of hosts is needed, or the smallest and the largest one. "
            f"Received: --nnodes {text}. For example: --nnodes 2:4"
        )
    return int(least), int(most or least)


def is_loopback(address: str) -> bool:
    """Whether the user has named an address that no other machine can reach."""
    return address == "localhost" or address.startswith("127.")
