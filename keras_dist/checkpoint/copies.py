"""Which ranks write checkpoints: one for each folder that a path stands for.

All hosts may see one folder under the path of `resume`, or each has one of its own on
a local disk, or some have one in common. A file that a rank has written and others look
for tells which. All ranks hold the same weights, so each folder gets a copy of each
checkpoint, and a host that is lost takes none away.
"""

import contextlib
import glob
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from keras_dist import comm
from keras_dist.checkpoint.files import Folder

Result = TypeVar("Result")

# Name of the file that a rank writes, for others to look for; no cache can know it.
_MARKER = ".checkpoint.{}.marker"

# Seconds between the times that a rank looks for another one's file, which a network
# file system may show late.
_WAITS = (0, 0.1, 0.2)


@dataclass(frozen=True)
class Copies:
    """The folders that the path of `resume` stands for.

    Args:
        ranks: For each folder the rank that reads and writes it, in ascending order;
            the first rank is always one of them.
        hosts: The name of the host of each of these ranks.
    """

    ranks: tuple[int, ...] = (0,)
    hosts: tuple[str, ...] = ("",)

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes checkpoints."""
        return comm.rank() in self.ranks

    @property
    def are_several(self) -> bool:
        """Whether there is more than one folder."""
        return len(self.ranks) > 1

    def host(self, rank: int) -> str:
        """The name of the host of a rank that writes."""
        return self.hosts[self.ranks.index(rank)]


def find_copies(folder: Folder) -> Copies:
    """Find out who writes to which folder; all ranks call this.

    Args:
        folder: The folder of this rank, which may be that of other ranks, too.

    Raises:
        RuntimeError: On all ranks, if a folder cannot be made or written to.
    """
    views = comm.gather((_view(folder.path), os.uname().nodename))
    first_of: dict[tuple[str, ...], int] = {}
    for rank, (view, _) in enumerate(views):
        first_of.setdefault(view, rank)
    ranks = _chosen_ranks(folder, sorted(first_of.values()))
    return Copies(tuple(ranks), tuple(views[rank][1] for rank in ranks))


def _chosen_ranks(folder: Folder, candidates: Sequence[int]) -> list[int]:
    """Of ranks that may have a folder each, the first one of each folder."""
    if len(candidates) == 1:
        return list(candidates)
    rank = comm.rank()
    marker = _MARKER.format(uuid.uuid4().hex)
    try:
        # First the first rank's alone: where all see it, only that rank has to write.
        names = _marked(folder, marker, by=[0])
        seen = comm.gather_or_raise(
            lambda: _first_seen(folder, names) if rank in candidates else None
        )
        others = [r for r in candidates if seen[r] is None]
        if not others:
            return [0]
        names = _marked(folder, marker, by=others)
        seen = comm.gather_or_raise(
            lambda: _first_seen(folder, names) if rank in others else None
        )
    finally:
        _remove_markers(folder, marker)
    firsts = {rank if seen[rank] is None else seen[rank] for rank in others}
    return [0, *sorted(rank for rank in firsts if rank is not None)]


def _marked(folder: Folder, marker: str, *, by: Sequence[int]) -> dict[int, str]:
    """Let ranks write a file each; its name, by rank, on all ranks."""

    def mark() -> str:
        os.makedirs(folder.path, exist_ok=True)
        with open(os.path.join(folder.path, marker), "xb"):
            return marker

    is_one = comm.rank() in by
    names = comm.gather_or_raise(lambda: explained(folder.path, mark) if is_one else "")
    return {rank: names[rank] for rank in by}


def _remove_markers(folder: Folder, own: str) -> None:
    """Where this rank has written a file, remove it, and those of killed ranks."""
    if os.path.exists(os.path.join(folder.path, own)):
        pattern = os.path.join(glob.escape(folder.path), _MARKER.format("*"))
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                os.remove(path)


def _first_seen(folder: Folder, names: dict[int, str]) -> int | None:
    """The first rank whose file is in the folder of this rank."""
    for seconds in _WAITS:
        time.sleep(seconds)
        with contextlib.suppress(OSError):
            os.listdir(folder.path)  # NFS then asks the server for what is new
        for rank, name in names.items():
            if os.path.exists(os.path.join(folder.path, name)):
                return rank
    return None


def _view(path: str) -> tuple[str, ...]:
    """Equal on ranks for which a path is the same folder without a look at it.

    These are processes with the same mounts: those of a host, or of a container.
    """
    mounts = boot = ""
    with contextlib.suppress(OSError):
        mounts = os.readlink("/proc/self/ns/mnt")
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    return path, os.uname().nodename, mounts, boot


def explained(path: str, work: Callable[[], Result]) -> Result:
    """Call a function that writes to a folder; explain its error."""
    try:
        return work()
    except OSError as error:
        raise RuntimeError(
            "Checkpoints cannot be written to the folder that `resume` names. "
            f"Received: resume={path!r} on host {os.uname().nodename}, {error}. Pass a "
            "folder that the first rank of each host can write to; it need not be "
            "shared."
        ) from error
