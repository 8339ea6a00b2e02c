"""Groups of ranks, by Horovod's names."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from keras_dist import comm


class ProcessSet:
    """A group of ranks, which `init` or `add_process_set` makes.

    Args:
        ranks_or_comm: The ranks of the group. A communicator of mpi4py is not taken.

    Raises:
        ValueError: If they are not whole numbers.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        is_list = isinstance(ranks_or_comm, Iterable)
        ranks = list(ranks_or_comm) if is_list else []
        if not is_list or any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(
                "A ProcessSet is a list of ranks; keras_dist takes no communicator of "
                f"MPI. Received: {ranks_or_comm!r}"
            )
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Number of its ranks, or `None` before it is made."""
        return None if self.process_set_id is None else len(self.members())

    def rank(self) -> int | None:
        """Number of this process in it, `None` before it is made or if not in it."""
        members = self.members()
        is_known = self.process_set_id is not None and self.included()
        return members.index(comm.rank()) if is_known else None

    def included(self) -> bool:
        """Tell whether this process is one of its ranks."""
        return comm.rank() in self.members()

    def members(self) -> Sequence[int]:
        """Its ranks."""
        return self.ranks or []

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class GlobalProcessSet(ProcessSet):
    """The group of all ranks."""

    process_set_id: int | None = 0

    def __init__(self) -> None:
        super().__init__([])

    def members(self) -> Sequence[int]:
        """All ranks."""
        return range(comm.size())


global_process_set = GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a group of ranks; all ranks call this, in the same order.

    It needs `init(process_sets="dynamic")`, or with other groups.

    Args:
        process_set: A `ProcessSet`, or its ranks.

    Returns:
        The `ProcessSet`.

    Raises:
        ValueError: If there is a group of these ranks already, or the ranks differ.
        RuntimeError: If `init` was called without `process_sets`.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    process_set.process_set_id = comm.add_process_set(process_set.members())
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a group; all ranks call this. Returns whether there was one to remove."""
    if process_set.process_set_id in (None, 0):
        return False
    process_set.process_set_id = None
    return comm.remove_process_set(process_set.members())


@contextlib.contextmanager
def among(process_set: ProcessSet) -> Iterator[None]:
    """Inside the block, collectives are among the ranks of the group.

    Raises:
        ValueError: If the group was not made, or this rank is not in it.
    """
    if process_set.process_set_id is None:
        raise ValueError(
            "A ProcessSet is used that was not made, or was removed. Received: "
            f"{process_set}. Pass it to `init` or to `add_process_set` before."
        )
    is_all = len(process_set.members()) == comm.size()
    with comm.within(None if is_all else process_set.members()):
        yield


def root_of(process_set: ProcessSet, root_rank: int) -> int:
    """Return the number within a group of a rank that is counted among all ranks.

    Raises:
        ValueError: If it is not a rank of the group.
    """
    if root_rank not in process_set.members():
        raise ValueError(
            f"`root_rank` must be a rank of {list(process_set.members())}. "
            f"Received: root_rank={root_rank}"
        )
    return process_set.members().index(root_rank)


def made(process_sets: Any) -> list[ProcessSet]:
    """Give their numbers to groups that `init` has made."""
    for process_set in process_sets:
        process_set.process_set_id = comm.number_of(process_set.members())
    return list(process_sets)
