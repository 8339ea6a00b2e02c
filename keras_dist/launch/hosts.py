"""Hosts: their names as the user writes them, their addresses, and this one's GPUs."""

import itertools
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"

# A host name or an address, maybe with a user before it. What begins with `-` would be
# an option of ssh.
_HOST = re.compile(r"(?:\w[\w.+\\-]*@)?[\w\[:][\w.:%\[\]-]*")

# A folder for each GPU, by NVIDIA's driver.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def check_host(name: str, *, source: str) -> None:
    """Check the name of a host before anything is done with it.

    >>> for name in ("a", "me@node-1.cluster", "10.0.0.1", "fe80::1%eth0"):
    ...     check_host(name, source="-H")
    """
    if not _HOST.fullmatch(name):
        raise ValueError(
            "The name of a host must be a host name or an address, or such a name "
            f"behind `user@`. Received: {name!r} in {source}."
        )


def parse_hosts(
    argument: str, num_ranks: int | None, *, source: str = ""
) -> dict[str, int]:
    """Parse `-H`: number of ranks of each host; the first hosts are filled first.

    Without a number of ranks there are as many as there are slots.

    >>> parse_hosts("a:2,b:2", 3)
    {'a': 2, 'b': 1}
    """
    source = source or f"-H {argument}"
    result: dict[str, int] = {}
    left = num_ranks
    for host in argument.split(","):
        name, _, count = host.strip().rpartition(":")
        if not name or not count.isdecimal() or name in result:
            raise ValueError(
                "Hosts must be names with numbers of slots, each name once, as in "
                f"a:2,b:2. Received: {source}"
            )
        check_host(name, source=source)
        result[name] = int(count) if left is None else min(left, int(count))
        left = None if left is None else left - result[name]
    if left:
        raise ValueError(
            "There are fewer slots than ranks. "
            f"Received: -np {num_ranks} {source}. "
            f"Add {left} slots, or start fewer ranks."
        )
    return {name: count for name, count in result.items() if count}


def read_hostfile(path: str | os.PathLike[str]) -> str:
    """Read the hosts of a file of `horovodrun` or `mpirun`, in the form of `-H`.

    A line for each host is `NAME slots=N`. Empty lines, and what stands behind a `#`,
    do not count.
    """
    hosts = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        words = " ".join(line.partition("#")[0].split())
        found = re.fullmatch(r"(\S+) slots=(\d+)", words)
        if found:
            check_host(found[1], source=f"line {number} of {path}")
            hosts.append(f"{found[1]}:{found[2]}")
        elif words:
            raise ValueError(
                "A line of a hosts file must be a name and its slots, as in "
                f"`a slots=2`. Received: line {number} of {path}: {line.strip()}"
            )
    return ",".join(hosts)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse `--rdzv`: address and port.

    >>> parse_endpoint("a:29401")
    ('a', 29401)
    """
    address, _, port = text.partition(":")
    if not address or not port.isdecimal():
        raise ValueError(
            "The hosts meet at the first one: its name or address, and a port. "
            f"Received: --rdzv {text}. For example: --rdzv a:29400"
        )
    check_host(address, source=f"--rdzv {text}")
    return address, int(port)


def is_here(host: str) -> bool:
    """Return whether a name is that of this host."""
    return host in ("localhost", LOOPBACK, os.uname().nodename)


def num_gpus() -> int:
    """Return how many GPUs a process of this host may use, without a library."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(
            [name for name in named.split(",") if name.strip() not in ("", "-1")]
        )
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0


def is_loopback(address: str) -> bool:
    """Return whether no other machine can reach an address."""
    return address == "localhost" or address.startswith("127.")


def find_address_towards(host: str) -> str:
    """Return the address of this host on the network that leads to another host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.rpartition("@")[2], 9))  # sends nothing
        except OSError as error:
            raise ValueError(
                f"A host cannot be reached. Received: {host} ({error}). Ranks connect "
                "by IPv4. If only ssh knows that name, pass the IPv4 address of the "
                "first host, as the others can reach it: --rdzv 10.0.0.1:29400"
            ) from error
        return str(probe.getsockname()[0])


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface of this host, by its name.

    >>> addresses()["lo"]
    '127.0.0.1'
    """
    return {
        name: each.address
        for name, all_addresses in psutil.net_if_addrs().items()
        for each in all_addresses
        if each.family == socket.AF_INET
    }


def interface_variables(address: str) -> dict[str, str]:
    """Return the variables for the network interface with this address of the host.

    >>> interface_variables("127.0.0.1")["HOROVOD_GLOO_IFACE"]
    'lo'
    """
    for name, found in addresses().items():
        if found == address:
            return {"HOROVOD_GLOO_IFACE": name, "NCCL_SOCKET_IFNAME": name}
    raise ValueError(
        f"No network interface of this host has this address. Received: {address}. "
        "Name the first host by an address that the others can reach: --rdzv."
    )


def ranges(ranks: Iterable[int]) -> str:
    """Write numbers of ranks: three and more in a row by their first and last.

    >>> ranges([4]), ranges([1, 0]), ranges([0, 1, 2, 3, 5, 7, 8])
    ('4', '0, 1', '0 to 3, 5, 7, 8')
    """
    places = enumerate(sorted(ranks))
    groups = itertools.groupby(places, lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Numbers of ranks in words.

    >>> ranks_in_words([1]), ranks_in_words([2, 3])
    ('rank 1', 'ranks 2, 3')
    """
    numbers = list(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {ranges(numbers)}"
