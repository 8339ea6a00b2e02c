"""Which ranks run on which host, and how the hosts reach each other."""

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
_HERE = ("localhost", LOOPBACK)

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Slot:
    """The place of one rank, as Horovod wants to be told.

    Args:
        rank: From 0.
        size: Of the job.
        host: Its name in `-H`.
        local_rank: Among the ranks of that host.
        local_size: How many these are.
        cross_rank: Among the ranks of other hosts with its local rank.
        cross_size: How many these are.
    """

    rank: int
    size: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def environment(self) -> dict[str, str]:
        """Variables from which Horovod learns the place."""
        return {
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(self.local_rank),
            "HOROVOD_LOCAL_SIZE": str(self.local_size),
            "HOROVOD_CROSS_RANK": str(self.cross_rank),
            "HOROVOD_CROSS_SIZE": str(self.cross_size),
        }


def slots(hosts: Sequence[tuple[str, int]]) -> list[Slot]:
    """The places of all ranks, host by host.

    Args:
        hosts: Names, and how many ranks each one has.

    >>> [(s.host, s.rank, s.local_rank, s.cross_rank, s.cross_size)
    ...  for s in slots([("a", 2), ("b", 1)])]
    [('a', 0, 0, 0, 2), ('a', 1, 1, 0, 1), ('b', 2, 0, 1, 2)]
    """
    size = sum(count for _, count in hosts)
    found: list[Slot] = []
    for name, count in hosts:
        for local_rank in range(count):
            crossing = [host for host, ranks in hosts if ranks > local_rank]
            found.append(
                Slot(
                    rank=len(found),
                    size=size,
                    host=name,
                    local_rank=local_rank,
                    local_size=count,
                    cross_rank=crossing.index(name),
                    cross_size=len(crossing),
                )
            )
    return found


def hosts_of(words: str | None, num_ranks: int | None) -> list[tuple[str, int]]:
    """Names of hosts and how many ranks each gets, as many as there are on this one.

    >>> hosts_of("localhost:2", None), hosts_of("a:2,b:2", 3), hosts_of(None, 4)
    ([('localhost', 2)], [('a', 2), ('b', 1)], [('localhost', 4)])

    Raises:
        ValueError: If hosts are not written so, or have too few slots.
    """
    if words is None:
        if num_ranks is None:
            raise ValueError(
                "The number of ranks is needed. Received: neither -np nor -H. "
                "For example: keras-dist run -np 2 script.py"
            )
        return [("localhost", num_ranks)]
    pieces = [part.strip().rpartition(":") for part in words.split(",")]
    names = [name for name, _, _ in pieces]
    if not all(name and count.isdecimal() for name, _, count in pieces) or (
        len(set(names)) < len(names)
    ):
        raise ValueError(
            "Hosts are names and numbers of ranks, each once, as in a:2,b:2. "
            f"Received: -H {words}"
        )
    left = sum(int(count) for _, _, count in pieces) if num_ranks is None else num_ranks
    found = []
    for name, _, count in pieces:
        taken = min(left, int(count))
        left -= taken
        if taken:
            found.append((name, taken))
    if left:
        raise ValueError(
            "There are fewer slots than ranks. "
            f"Received: -np {num_ranks} -H {words}, which lack {left}."
        )
    return found


def is_here(host: str) -> bool:
    """Whether a host is this one."""
    return host in (*_HERE, os.uname().nodename)


def address_towards(host: str) -> str:
    """The address by which this host is known to another one.

    Raises:
        ValueError: If there is no such host, or no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError as error:
            raise ValueError(
                f"There is no way to a host. Received: {host} ({error}). If ssh knows "
                "it by that name, say by `--address` which address this host has there."
            ) from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Name of the network interface that has an address of this host.

    >>> interface_of("127.0.0.1")
    'lo'

    Raises:
        ValueError: If none has it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            question = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, question)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise ValueError(
        f"No network interface of this host has this address. Received: {address}"
    )
