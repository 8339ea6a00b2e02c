"""The hosts that have come to a rendezvous, their numbers, and their ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_dist.launch.hosts import LOOPBACK, Slot, slots


@dataclass(frozen=True)
class Member:
    """A host that has come, as it describes itself.

    Args:
        host: Its name. Two members of one name are one host, and share its devices.
        num_ranks: How many ranks it starts.
        number: Its number among the hosts; `None` for the next one that is free.
        num_hosts: How many hosts it expects, at most.
        version: Version of keras_dist.
        reached: The address at which it reaches the first host.
        is_quiet: Whether its screen is that of the first host.
        min_hosts: How many hosts it expects, at least; `None` for as many as at most.
    """

    host: str
    num_ranks: int
    number: int | None
    num_hosts: int
    version: str
    reached: str = LOOPBACK
    is_quiet: bool = False
    min_hosts: int | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether it expects that hosts come and go."""
        return self.min_hosts not in (None, self.num_hosts)

    @property
    def nnodes(self) -> str:
        """How many hosts it expects, as `--nnodes` has it."""
        return nnodes_text(self.min_hosts, self.num_hosts)


def nnodes_text(least: int | None, most: int) -> str:
    """Numbers of hosts, as `--nnodes` has them.

    >>> nnodes_text(2, 4), nnodes_text(None, 3)
    ('2:4', '3')
    """
    return str(most) if least in (None, most) else f"{least}:{most}"


def ranks_of_hosts(members: Sequence[Member]) -> dict[str, int]:
    """Number of ranks of each host.

    >>> ranks_of_hosts([Member(host, 2, None, 3, "0") for host in "aba"])
    {'a': 4, 'b': 2}
    """
    counts: dict[str, int] = {}
    for member in members:
        counts[member.host] = counts.get(member.host, 0) + member.num_ranks
    return counts


def numbered(
    members: Mapping[str, Member], num_hosts: int, before: Sequence[str | None] = ()
) -> list[str | None]:
    """Give numbers to the members; those without one are numbered as they come.

    Args:
        members: The members by their ids, in the order in which they came.
        num_hosts: Number of hosts.
        before: The last numbering, which members that are still there keep.

    Returns:
        For each number the id of a member; `None` where one is missing.

    >>> one = {name: Member(name, 1, None, 3, "0") for name in "ab"}
    >>> two = one | {"c": Member("c", 1, 0, 3, "0")}
    >>> numbered(one, 3), numbered(two, 3), numbered(two, 3, [None, "a", "b"])
    (['a', 'b', None], ['c', 'a', 'b'], ['c', 'a', 'b'])
    """
    found: list[str | None] = [None] * num_hosts
    for number, name in enumerate(before[:num_hosts]):
        if name in members:
            found[number] = name
    for name, member in members.items():
        own = member.number
        if own is not None and name not in found and found[own : own + 1] == [None]:
            found[own] = name
    for name, member in members.items():
        if member.number is None and name not in found and None in found:
            found[found.index(None)] = name
    return found


def slots_of(members: Sequence[Member]) -> list[list[Slot]]:
    """The slots of each member; those of one host stand side by side.

    Args:
        members: The members by their numbers.

    >>> two = [Member(host, 1, None, 3, "0") for host in "aba"]
    >>> [[(s.host, s.rank, s.local_rank) for s in each] for each in slots_of(two)]
    [[('a', 0, 0)], [('b', 2, 0)], [('a', 1, 1)]]
    """
    counts = ranks_of_hosts(members)
    free = {host: [] for host in counts}  # type: dict[str, list[Slot]]
    for slot in slots(list(counts.items())):
        free[slot.host].append(slot)
    result = []
    for member in members:
        own, rest = free[member.host], free[member.host][member.num_ranks :]
        result.append(own[: member.num_ranks])
        free[member.host] = rest
    return result
