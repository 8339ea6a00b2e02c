"""Hosts, their names and slots as the user writes them, and the GPUs of this one."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"

# Where hosts meet, if no port is named.
PORT = 29400

# A host name or an address, maybe with a user before it. What begins with `-` would be
# an option of ssh.
_HOST = re.compile(r"(?:\w[\w.+\\-]*@)?[\w\[:][\w.:%\[\]-]*")

# A folder for each GPU, by NVIDIA's driver.
_DRIVER = Path("/proc/driver/nvidia/gpus")


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


def parse_hosts(argument: str, num_ranks: int | None) -> dict[str, int]:
    """Parse `-H`: number of ranks of each host; the first hosts are filled first.

    Args:
        argument: Hosts and their slots, as in `-H a:2,b:2`.
        num_ranks: Number of ranks; `None` for as many as there are slots.

    >>> parse_hosts("a:2,b:2", 3)
    {'a': 2, 'b': 1}

    Raises:
        ValueError: If `argument` has another form, a name that no host has, or fewer
            slots than ranks.
    """
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
    result = {}
    for name, _, count in hosts:
        if used := min(left, int(count)):
            result[name] = used
            left -= used
    if left:
        raise ValueError(
            "There are fewer slots than ranks. "
            f"Received: -np {num_ranks} -H {argument}. "
            f"Add {left} slots, or start fewer ranks."
        )
    return result


def read_hostfile(path: str | os.PathLike[str]) -> str:
    """Read the hosts of a file of `horovodrun` or `mpirun`, in the form of `-H`.

    A line for each host is `NAME slots=N`. Empty lines, and what stands behind a `#`,
    do not count.

    Args:
        path: Path of the file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If a line has another form, or a name that no host has.
    """
    hosts = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if words and not re.fullmatch(r"\S+ slots=\d+", " ".join(words)):
            raise ValueError(
                "A line of a hosts file must be a name and its slots, as in "
                f"`a slots=2`. Received: line {number} of {path}: {line.strip()}"
            )
        if words:
            check_host(words[0], source=f"line {number} of {path}")
            hosts.append(f"{words[0]}:{words[1].removeprefix('slots=')}")
    return ",".join(hosts)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse `--rdzv`: address and port.

    >>> parse_endpoint("a:29401"), parse_endpoint("a")
    (('a', 29401), ('a', 29400))

    Raises:
        ValueError: If it has another form.
    """
    address, _, port = text.partition(":")
    if not address or not (port or "0").isdecimal() or text.endswith(":"):
        raise ValueError(
            "The hosts meet at the first one: its name or address, and a port. "
            f"Received: --rdzv {text}. For example: --rdzv a:{PORT}"
        )
    check_host(address, source=f"--rdzv {text}")
    return address, int(port or PORT)


def is_here(host: str) -> bool:
    """Return whether a name is that of this host."""
    return host in ("localhost", LOOPBACK, os.uname().nodename)


def num_gpus(environ: Mapping[str, str] | None = None) -> int:
    """Return how many GPUs a process of this host may use, without a library.

    Args:
        environ: Environment variables; by default those of this process.

    >>> [num_gpus({"CUDA_VISIBLE_DEVICES": named}) for named in ("0,2", "3", "")]
    [2, 1, 0]
    """
    environ = os.environ if environ is None else environ
    if "CUDA_VISIBLE_DEVICES" in environ:
        named = environ["CUDA_VISIBLE_DEVICES"].split(",")
        return len([name for name in named if name.strip() not in ("", "-1")])
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0


def ranges(ranks: Iterable[int]) -> str:
    """Write numbers of ranks: three and more in a row by their first and last.

    >>> ranges([4]), ranges([1, 0]), ranges([0, 1, 2, 3, 5, 7, 8])
    ('4', '0, 1', '0 to 3, 5, 7, 8')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )
