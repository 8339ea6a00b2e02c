"""Which ranks run on which host, and addresses of this host."""

import fcntl
import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_dist.launch.gpus import num_gpus

LOOPBACK = "127.0.0.1"
_HERE = ("localhost", LOOPBACK)

_SIOCGIFADDR = 0x8915

# A host name or an address, maybe with a user before it. What begins with `-` would be
# an option of ssh.
_HOST = re.compile(r"(?:\w[\w.+\\-]*@)?[\w\[:][\w.:%\[\]-]*")


@dataclass(frozen=True)
class Slot:
    """Host and numbers of one rank, as Horovod needs them.

    Args:
        rank: Number of the rank, from 0.
        size: Number of ranks of the job.
        host: Name of its host, as in `-H`.
        local_rank: Number of the rank on its host, from 0.
        local_size: Number of ranks on its host.
        cross_rank: Number of the rank among those with the same local rank.
        cross_size: Number of ranks with the same local rank.
    """

    rank: int
    size: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def environment(self) -> dict[str, str]:
        """Environment variables that pass the slot to Horovod."""
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
    """The slots of all ranks, host by host.

    Args:
        hosts: Name and number of ranks of each host.

    >>> [(s.host, s.rank, s.local_rank, s.cross_rank, s.cross_size)
    ...  for s in slots([("a", 2), ("b", 1)])]
    [('a', 0, 0, 0, 2), ('a', 1, 1, 0, 1), ('b', 2, 0, 1, 2)]
    """
    size = sum(count for _, count in hosts)
    cross_sizes = Counter(k for _, count in hosts for k in range(count))
    before: Counter[int] = Counter()  # hosts so far with a rank of this local rank
    result: list[Slot] = []
    for name, count in hosts:
        for local_rank in range(count):
            result.append(
                Slot(
                    rank=len(result),
                    size=size,
                    host=name,
                    local_rank=local_rank,
                    local_size=count,
                    cross_rank=before[local_rank],
                    cross_size=cross_sizes[local_rank],
                )
            )
            before[local_rank] += 1
    return result


def slots_of_workers(hosts: Sequence[str]) -> list[Slot]:
    """A slot for each worker that another system has started, in the workers' order.

    Ranks are numbered host by host, in the order in which the hosts are named first.

    Args:
        hosts: Name of the host of each worker.

    >>> [(slot.rank, slot.host, slot.local_rank)
    ...  for slot in slots_of_workers(["a", "b", "a"])]
    [(0, 'a', 0), (2, 'b', 0), (1, 'a', 1)]
    """
    counts = [(host, hosts.count(host)) for host in dict.fromkeys(hosts)]
    found = {host: [s for s in slots(counts) if s.host == host] for host, _ in counts}
    return [found[host].pop(0) for host in hosts]


def check_host(name: str, *, source: str) -> None:
    """Check the name of a host before anything is done with it.

    Args:
        name: The name.
        source: Where it comes from, in words.

    >>> for name in ("a", "me@node-1.cluster", "10.0.0.1", "fe80::1%eth0"):
    ...     check_host(name, source="-H")

    Raises:
        ValueError: If no host has such a name.
    """
    if not _HOST.fullmatch(name):
        raise ValueError(
            "The name of a host must be a host name or an address, or such a name "
            f"behind `user@`. Received: {name!r} in {source}."
        )


def hosts_of(argument: str | None, num_ranks: int | None) -> list[tuple[str, int]]:
    """Name and number of ranks of each host; the first hosts are filled first.

    Args:
        argument: Hosts and their slots, as in `-H a:2,b:2`; `None` for this host alone.
        num_ranks: Number of ranks; `None` for as many as there are slots or, on this
            host alone, GPUs.

    >>> hosts_of("localhost:2", None), hosts_of("a:2,b:2", 3), hosts_of(None, 4)
    ([('localhost', 2)], [('a', 2), ('b', 1)], [('localhost', 4)])

    Raises:
        ValueError: If `argument` has another form, a name that no host has, or fewer
            slots than ranks.
    """
    if argument is None:
        if num_ranks is None and not (num_ranks := num_gpus()):
            raise ValueError(
                "The number of ranks is needed, since this host has no GPU. Received: "
                "neither -np N nor -H. For example: keras-dist run -np 2 script.py"
            )
        return [("localhost", num_ranks)]
    hosts = [host.strip().rpartition(":") for host in argument.split(",")]
    names = [name for name, _, _ in hosts]
    if not all(name and count.isdecimal() for name, _, count in hosts) or (
        len(set(names)) < len(names)
    ):
        raise ValueError(
            "Hosts must be names with numbers of slots, each name once, as in a:2,b:2. "
            f"Received: -H {argument}"
        )
    for name in names:
        check_host(name, source=f"-H {argument}")
    left = sum(int(count) for _, _, count in hosts) if num_ranks is None else num_ranks
    result = []
    for name, _, count in hosts:
        used = min(left, int(count))
        left -= used
        if used:
            result.append((name, used))
    if left:
        raise ValueError(
            "There are fewer slots than ranks. "
            f"Received: -np {num_ranks} -H {argument}. "
            f"Add {left} slots, or start fewer ranks."
        )
    return result


def hosts_in(path: str | os.PathLike[str]) -> str:
    """The hosts of a file, as `-H` takes them.

    The file is one of `horovodrun` or `mpirun`: a line for each host, `NAME slots=N`.
    Empty lines, and what stands behind a `#`, do not count.

    Args:
        path: Path of the file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If a line has another form, or a name that no host has.
    """
    hosts = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *rest = words
        key, _, count = rest[0].partition("=") if len(rest) == 1 else ("", "", "")
        if key != "slots" or not count.isdecimal():
            raise ValueError(
                "A line of a hosts file must be a name and its slots, as in "
                f"`a slots=2`. Received: line {number} of {path}: {line.strip()}"
            )
        check_host(name, source=f"line {number} of {path}")
        hosts.append(f"{name}:{count}")
    return ",".join(hosts)


def is_here(host: str) -> bool:
    """Whether a name is that of this host."""
    return host in (*_HERE, os.uname().nodename)


def own_address(named: str | None, other: str) -> str:
    """The address of this host by which other hosts reach it.

    Args:
        named: What the user has named, as by `--address`; `None` to find it by routing.
        other: Name of another host.

    Raises:
        ValueError: If it is not one of this host, or of IPv6; or as `address_towards`.
    """
    if named is None:
        return address_towards(other)
    with socket.socket(socket.AF_INET) as probe:
        try:
            probe.bind((named, 0))
        except OSError as error:
            raise ValueError(
                "No network interface of this host has this address. Received: "
                f"{named} ({error}). Pass an IPv4 address of this host with "
                "`--address`."
            ) from error
    return named


def address_towards(host: str) -> str:
    """The address of this host on the network that leads to another host.

    Raises:
        ValueError: If the other host is not known, or cannot be reached.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.rpartition("@")[2], 9))  # sends nothing
        except OSError as error:
            version = "; it has IPv6 addresses alone" if has_only_ipv6(host) else ""
            raise ValueError(
                f"A host cannot be reached. Received: {host} ({error}{version}). If "
                "only ssh knows that name, pass the IPv4 address of this host, as the "
                "other host can reach it, with `--address`."
            ) from error
        return str(probe.getsockname()[0])


def has_only_ipv6(host: str) -> bool:
    """Whether a name is known here by IPv6 addresses alone, which Gloo cannot use."""
    try:
        found = socket.getaddrinfo(host.rpartition("@")[2], None)
    except OSError:
        return False
    return {family for family, *_ in found} == {socket.AF_INET6}


def interface_of(address: str) -> str:
    """Name of the network interface with an address of this host.

    >>> interface_of("127.0.0.1")
    'lo'

    Raises:
        ValueError: If no interface has this address.
    """
    for name, found in addresses().items():
        if found == address:
            return name
    raise ValueError(
        f"No network interface of this host has this address. Received: {address}. "
        "Pass an address of this host with `--address`."
    )


def addresses() -> dict[str, str]:
    """The IPv4 address of each network interface of this host, by its name.

    >>> addresses()["lo"]
    '127.0.0.1'
    """
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no address
                continue
            found[name] = socket.inet_ntoa(reply[20:24])
    return found
