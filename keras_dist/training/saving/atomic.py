"""Replace files as a whole: a reader sees the old file or the new one."""

import contextlib
import errno
import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from keras_dist import comm


def new_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a new file for writing and reading, in the place of what is there.

    A link that somebody else has put there is removed, and never followed.

    Args:
        path: Path of a local file, in a folder that exists.

    Raises:
        OSError: If it cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    return open(path, "x+b")


def replace(path: Any, write: Callable[[str], Any], *, num_bytes: int = 0) -> Any:
    """Let `write` make a temporary file beside `path`, then rename it to `path`.

    If the disk is full or the process is killed, the file at `path` is the one before.
    Several ranks that write the same path do not damage the file.

    Args:
        path: Path of a local file, in a folder that exists.
        write: A function that writes a file to a given path, with the same extension.
        num_bytes: If HDF5 writes the file: its approximate size.

    Returns:
        The result of `write`.

    Raises:
        OSError: If there is no room for the file.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    # Always the same name: the next save overwrites what a killed process has left.
    rank = comm.world_of_job().rank
    part = os.path.join(folder, f".keras_dist.{rank}.{name[-200:]}")
    try:
        new_file(part).close()  # what `write` would follow may be a link
        if num_bytes:
            _reserve(part, max(num_bytes, _size(target)))
        result = write(part)
        _settle(part)
        with contextlib.suppress(OSError):  # keep the mode of the file before
            shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
    return result


def merge(path: Any, write: Callable[[str], Any]) -> Any:
    """Let `write` make files in a folder of its own, and move them to `path`.

    For what is more than one file: a folder, or weights in several files. A folder that
    is not there yet is moved as a whole, and only if no other rank has done so in the
    meantime: the files of two ranks do not fit together. Into one that is there, each
    file is moved as a whole, and what else is in it stays.

    Args:
        path: Of a local file or folder.
        write: Makes it at the path that it is given, of the same name.

    Returns:
        What `write` returns.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    is_new = not os.path.exists(target)
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".keras_dist.", dir=folder) as own:
        result = write(os.path.join(own, name))
        with _locked(folder):
            if not is_new or not os.path.isdir(os.path.join(own, name)):
                _move_files(own, folder)
            elif not os.path.exists(target):
                os.rename(os.path.join(own, name), target)
    return result


def _move_files(source: str, target: str) -> None:
    for folder, _, files in os.walk(source):
        there = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(there, exist_ok=True)
        for file in files:
            os.replace(os.path.join(folder, file), os.path.join(there, file))


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Inside the block, other ranks that come here for this folder wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class SavesWhole:
    """Mixin for a model: `save` and `save_weights` replace a file as a whole."""

    def save(
        self: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        own = super().save  # type: ignore[misc]
        if not (is_replaceable(filepath) and overwrite):
            return own(filepath, overwrite, *args, **kwargs)
        return replace(
            filepath,
            lambda part: own(part, True, *args, **kwargs),
            num_bytes=hdf5_size(self, filepath),
        )

    def save_weights(
        self: Any, filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        own = super().save_weights  # type: ignore[misc]
        # With more arguments, Keras may write several files.
        is_one_file = not args and not any(kwargs.values())
        if not (is_replaceable(filepath) and overwrite and is_one_file):
            return own(filepath, overwrite, *args, **kwargs)
        return replace(
            filepath,
            lambda part: own(part, True),
            num_bytes=hdf5_size(self, filepath),
        )


def is_replaceable(path: Any) -> bool:
    """Tell whether Keras would write one local file at `path`."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    # Keras refuses other extensions, with an error that names the path.
    if not str(path).endswith((".keras", ".h5", ".hdf5")):
        return False
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        return False
    return not is_remote(path) and os.path.isdir(os.path.dirname(target))


def is_remote(path: Any) -> bool:
    """Tell whether `path` is an address, as `gs://…`, where files cannot be renamed."""
    return "://" in os.fspath(path)


def hdf5_size(model: Any, path: Any) -> int:
    """Estimate the size of an HDF5 file of the model's state; 0 for a `.keras` file.

    There HDF5 writes to memory.
    """
    if str(path).endswith(".keras"):
        return 0
    found = getattr(model, "optimizer", None)
    variables = [*model.variables, *(found.variables if found is not None else ())]
    numbers = sum(math.prod(v.shape) for v in variables)
    # Nearly all numbers have four bytes; HDF5 adds its headers.
    return 4 * numbers + 2048 * (len(variables) + 4)


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _reserve(path: str, num_bytes: int) -> None:
    """Raise if there is no room: HDF5 ends the process when a write fails."""
    with open(path, "rb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise


def _settle(path: str) -> None:
    """Wait until the data is on the disk: the file must not be renamed before."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
