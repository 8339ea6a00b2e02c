"""The newest whole checkpoint of all folders, and how each folder gets it."""

import contextlib
import errno
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_dist import comm
from keras_dist.checkpoint import files
from keras_dist.checkpoint.copies import Copies, explained
from keras_dist.report import new_file

# A checkpoint is sent in messages of so many bytes.
_PIECE_BYTES = 16 * 2**20


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
    """The newest checkpoint of a folder that is whole, and what is damaged."""
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
    """The file for a checkpoint that is received, with room for it."""
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
