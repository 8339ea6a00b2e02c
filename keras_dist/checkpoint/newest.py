"""Find the newest checkpoint that is whole on all hosts, and copy it to the others."""

import contextlib
import errno
import glob
import json
import os
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from keras_dist import comm
from keras_dist.checkpoint import files
from keras_dist.checkpoint.files import Folder
from keras_dist.report import new_file

# A checkpoint is sent in messages of so many bytes.
_PIECE_BYTES = 16 * 2**20


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
        """True if this rank writes checkpoints."""
        return comm.rank() in self.ranks

    @property
    def are_several(self) -> bool:
        """True if there is more than one folder."""
        return len(self.ranks) > 1

    def host(self, rank: int) -> str:
        """Return the name of the host of a rank that writes."""
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
    """Return the first rank whose file is in the folder of this rank."""
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


@dataclass(frozen=True)
class Whole:
    """A checkpoint whose checksum is right.

    Args:
        begun: When its training began, in seconds since 1970; 0 in files of before.
        number: Its number.
        digest: Its checksum.
        num_bytes: Size of the file.
    """

    begun: float
    number: int
    digest: str
    num_bytes: int


def read_newest(folder: files.Folder, copies: Copies) -> tuple[Any, str]:
    """Read the newest checkpoint, and let each folder have it; all ranks call this.

    Of several folders it is the newest that is whole in any of them. The training that
    began last wins, and of it the highest number: a host that was away may have
    checkpoints of an earlier training with higher ones.

    Args:
        folder: The folder of this rank.
        copies: The folders, and the rank that reads and writes each.

    Returns:
        The tree on the first rank, `None` on others and if there is no checkpoint; and
        on all ranks the name of the host that had it, if it had to be sent.

    Raises:
        ValueError: On all ranks, if there are checkpoints, and all are damaged.
        RuntimeError: On all ranks, if a folder cannot be read or written.
    """
    is_first = comm.rank() == 0
    if not copies.are_several:
        none: tuple[Any, list[str]] = (None, [])
        tree, damaged = comm.run_on_all(
            lambda: _read(folder, folder.newest) if is_first else none
        )
        if damaged:
            _warn_of_older(damaged)
        return tree, ""
    found = comm.gather_or_raise(
        lambda: _read(folder, lambda: _look(folder)) if copies.is_writer else (None, [])
    )
    newest, root, lacking = chosen(found, copies)
    if newest is None:
        return None, ""
    _, damaged = found[comm.rank()]
    if damaged and comm.rank() in lacking:
        warnings.warn(
            "A checkpoint is damaged, and that of another host is used: "
            f"{'; '.join(damaged)}",
            stacklevel=2,
        )
    elif damaged:
        _warn_of_older(damaged)
    if lacking:
        _send(folder, newest, root=root, to=lacking)
    path = folder.file(newest.number)
    tree = comm.run_on_all(
        lambda: _read(folder, lambda: files.read(path)) if is_first else None
    )
    return tree, copies.host(root) if lacking else ""


def chosen(
    found: Sequence[tuple[Whole | None, list[str]]], copies: Copies
) -> tuple[Whole | None, int, list[int]]:
    """Choose the newest checkpoint that is whole.

    Args:
        found: For each rank the newest that is whole in its folder, `None` if none is
            or the rank does not write; and a line for each newer one that is damaged.
        copies: The folders, and the rank that reads and writes each.

    Returns:
        The checkpoint, `None` if all folders are empty; the first rank that has it;
        and the ranks whose folders lack it.

    Raises:
        ValueError: If there are checkpoints, and all are damaged.
    """
    per_rank = [whole for whole, _ in found]
    newest = max(
        filter(None, per_rank),
        key=lambda whole: (whole.begun, whole.number),
        default=None,
    )
    if newest is None:
        damaged = [
            f"on host {copies.host(rank)}: {line}"
            for rank in copies.ranks
            for line in found[rank][1]
        ]
        if damaged:
            raise ValueError(str(files.none_is_whole(damaged)))
        return None, 0, []
    lacking = [rank for rank in copies.ranks if per_rank[rank] != newest]
    return newest, per_rank.index(newest), lacking


def _look(folder: files.Folder) -> tuple[Whole | None, list[str]]:
    """Return the newest checkpoint of a folder that is whole, and what is damaged."""
    found, damaged = folder.find(_described)
    if found is None:
        return None, damaged
    begun, digest, num_bytes = found
    return Whole(begun, folder.number, digest, num_bytes), damaged


def _described(path: str) -> tuple[float, str, int]:
    """When the training began, checksum and size of a file; the arrays are not kept."""
    with open(path, "rb") as file:
        digest = files.check(file)
        try:
            header = json.loads(file.readline())
            tree = json.loads(file.read(header["bytes"]))
            files.filled(tree, [None] * len(header["arrays"]))
            begun = float(tree["dict"].get("begun", 0))
        except files.FORGED as error:
            raise files.DamagedError(f"it is not a checkpoint ({error})") from None
        return begun, digest, os.fstat(file.fileno()).st_size


def _send(folder: files.Folder, newest: Whole, *, root: int, to: Sequence[int]) -> None:
    """Send a checkpoint to the folders that lack it; all ranks call this.

    No rank leaves the loop before the others, whatever fails there: its error is raised
    on all behind it.

    Raises:
        RuntimeError: On all ranks, if one could not read or write it.
    """
    rank, attempts = comm.rank(), _Attempts()
    file: Any = None
    if rank == root:
        file = attempts.run(open, folder.file(newest.number), "rb")
    elif rank in to:
        file = attempts.run(_new_part, folder, newest.num_bytes)
    for begin in range(0, newest.num_bytes, _PIECE_BYTES):
        piece = np.zeros(min(_PIECE_BYTES, newest.num_bytes - begin), np.uint8)
        if rank == root:
            attempts.run(_fill, piece, file)
        (piece,) = comm.broadcast_arrays([piece], root)
        if rank in to:
            attempts.run(_write, piece, file)
    if rank in to:
        attempts.run(_accept, folder, file, newest)
        with contextlib.suppress(OSError):
            os.remove(folder.part)  # if it is still there
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()
    comm.run_on_all(lambda: _read(folder, attempts.finish))


class _Attempts:
    """Calls functions until one of them fails, and then no more."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call a function unless one before it has failed."""
        if self._error is None:
            try:
                return work(*args)
            except Exception as error:  # raised here, the other ranks would wait
                self._error = error
        return None

    def finish(self) -> None:
        """Raise the error, if any."""
        if self._error is not None:
            raise self._error


def _fill(piece: np.ndarray, file: Any) -> None:
    if file.readinto(piece) < len(piece):
        raise OSError(errno.EIO, "the file has become shorter", file.name)


def _write(piece: np.ndarray, file: Any) -> None:
    file.write(piece)


def _new_part(folder: files.Folder, num_bytes: int) -> Any:
    """Make the file for a checkpoint that is received, with room for it."""
    file = new_file(folder.part)
    while True:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return file
        except OSError as error:  # some file systems do not support this
            if error.errno not in files.FULL:
                return file
            if not folder.make_room():
                file.close()
                os.remove(folder.part)
                raise


def _accept(folder: files.Folder, file: Any, newest: Whole) -> None:
    """Make what was received a checkpoint, if it is what was sent."""
    file.flush()
    os.fsync(file.fileno())
    try:
        _, digest, _ = _described(folder.part)
    except files.DamagedError:
        digest = ""
    if digest != newest.digest:
        raise RuntimeError(
            "A checkpoint was damaged while it was sent to this host. Received: "
            f"{folder.file(newest.number)}, {newest.num_bytes:,} bytes, with another "
            f"checksum, on host {os.uname().nodename}. Start the same command again."
        )
    folder.accept(newest.number)


def _read(folder: files.Folder, work: Callable[[], Any]) -> Any:
    """Call a function; its errors become those of types that all ranks can raise."""
    try:
        return explained(folder.path, work)
    except files.DamagedError as error:
        raise ValueError(str(error)) from None


def _warn_of_older(damaged: Sequence[str]) -> None:
    warnings.warn(
        f"A checkpoint is damaged, and an older one is used: {'; '.join(damaged)}",
        stacklevel=2,
    )
