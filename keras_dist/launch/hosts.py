"""Hosts and their ranks: as the user names them, and as they are numbered."""

import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

LOOPBACK = "127.0.0.1"
_HERE = ("localhost", LOOPBACK)

# A host name or an address, maybe with a user before it. What begins with `-` would be
# an option of ssh.
_HOST = re.compile(r"(?:\w[\w.+\\-]*@)?[\w\[:][\w.:%\[\]-]*")

# A folder for each GPU, by NVIDIA's driver.
_DRIVER = Path("/proc/driver/nvidia/gpus")


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
        """Return the environment variables that pass the slot to Horovod."""
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
    """Return the slots of all ranks, host by host.

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


def parse_hosts(argument: str | None, num_ranks: int | None) -> list[tuple[str, int]]:
    """Parse `-H`: name and number of ranks of each host; the first are filled first.

    Args:
        argument: Hosts and their slots, as in `-H a:2,b:2`; `None` for this host alone.
        num_ranks: Number of ranks; `None` for as many as there are slots or, on this
            host alone, GPUs.

    >>> parse_hosts("localhost:2", None), parse_hosts("a:2,b:2", 3)
    ([('localhost', 2)], [('a', 2), ('b', 1)])
    >>> parse_hosts(None, 4)
    [('localhost', 4)]

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


def read_hostfile(path: str | os.PathLike[str]) -> str:
    """Read the hosts of a file, in the form of `-H`.

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


def parse_host_count(text: str, *, source: str) -> int:
    """Parse a number of hosts.

    Args:
        text: The number.
        source: Where it comes from, in words.

    Raises:
        ValueError: If it is no number.
    """
    if not text.isdecimal():
        raise ValueError(
            f"A number of hosts is needed. Received: {source} {text}. It is fixed "
            "for a job; with `resume=` the same command goes on with other hosts."
        )
    return int(text)


def is_here(host: str) -> bool:
    """Return whether a name is that of this host."""
    return host in (*_HERE, os.uname().nodename)


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


@dataclass(frozen=True)
class Meeting:
    """Where the hosts of a job meet, and who this one is.

    Args:
        address: Name or address of the first host.
        port: Port of the store there.
        num_hosts: Number of hosts.
        number: Number of this host; `None` to be numbered as it comes. Number 0 is the
            first host. Without a number it is the one that has the address.
        num_ranks: Ranks of this host; `None` for one for each GPU, or one.
        host: Name of this host.
        names: Names of all hosts by their numbers, if they are known.
        is_quiet: Whether all hosts print to one screen.
        saved_code: Exit code when a signal has stopped the job and all ranks have
            saved; `None` for that of the signal.
        signals: Signals that stop the job beside Ctrl-C, SIGTERM and SIGHUP.
    """

    address: str = LOOPBACK
    port: int = 29400
    num_hosts: int = 1
    number: int | None = None
    num_ranks: int | None = None
    host: str = field(default_factory=socket.gethostname)
    names: Sequence[str] = ()
    is_quiet: bool = False
    saved_code: int | None = None
    signals: Sequence[Signals] = ()


@dataclass(frozen=True)
class Member:
    """A host that has come, as it describes itself.

    Args:
        host: Its name. Two members of one name are one host, and share its devices.
        num_ranks: How many ranks it starts.
        number: Its number among the hosts; `None` for the next one that is free.
        reached: The address at which it reaches the first host.
    """

    host: str
    num_ranks: int
    number: int | None = None
    reached: str = LOOPBACK


def count_ranks(members: Sequence[Member]) -> dict[str, int]:
    """Return the number of ranks of each host.

    >>> count_ranks([Member(host, 2) for host in "aba"])
    {'a': 4, 'b': 2}
    """
    counts: dict[str, int] = {}
    for member in members:
        counts[member.host] = counts.get(member.host, 0) + member.num_ranks
    return counts


def number_hosts(members: Mapping[str, Member], num_hosts: int) -> list[str | None]:
    """Number the members; those without a number of their own as they come.

    Args:
        members: The members by their ids, in the order in which they came.
        num_hosts: Number of hosts.

    Returns:
        For each number the id of a member; `None` where one is missing.

    >>> one = {name: Member(name, 1) for name in "ab"}
    >>> two = one | {"c": Member("c", 1, 0)}
    >>> number_hosts(one, 3), number_hosts(two, 3)
    (['a', 'b', None], ['c', 'a', 'b'])
    """
    found: list[str | None] = [None] * num_hosts
    for name, member in members.items():
        own = member.number
        if own is not None and found[own : own + 1] == [None]:
            found[own] = name
    for name, member in members.items():
        if member.number is None and None in found:
            found[found.index(None)] = name
    return found


def assign_slots(members: Sequence[Member]) -> list[list[Slot]]:
    """Return the slots of each member; those of one host stand side by side.

    Args:
        members: The members by their numbers.

    >>> two = [Member(host, 1) for host in "aba"]
    >>> [[(s.host, s.rank, s.local_rank) for s in each] for each in assign_slots(two)]
    [[('a', 0, 0)], [('b', 2, 0)], [('a', 1, 1)]]
    """
    counts = count_ranks(members)
    free = {host: [] for host in counts}  # type: dict[str, list[Slot]]
    for slot in slots(list(counts.items())):
        free[slot.host].append(slot)
    result = []
    for member in members:
        own, rest = free[member.host], free[member.host][member.num_ranks :]
        result.append(own[: member.num_ranks])
        free[member.host] = rest
    return result


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
