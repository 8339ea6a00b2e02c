"""Files of checkpoints: written and read whole, and Python values in them."""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from keras_dist.launch.time_limits import TimeLimits

_NAME = re.compile(r"checkpoint-(\d{8,})\.keras_dist")
_PART = ".checkpoint.part"  # the file that is being written
KEPT = 2  # older checkpoints are removed

# Of a file system without locks, or whose server cannot keep them.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_locked: set[str] = set()  # by this process

# The last line of a file, with the number of the format.
_LAST_LINE = b"\nkeras_dist checkpoint 3, sha256 "
_LAST_BYTES = len(_LAST_LINE) + 64 + 1

# Seconds between attempts to read a file: a server of files may have to start again.
_WAITS = (0.2, 1.0, 3.0)


class DamagedError(ValueError):
    """The content of a file is not that of a checkpoint as it was written."""


@dataclass
class Folder:
    """A folder of checkpoints; only one process writes to it at a time.

    Args:
        path: Path of the folder. `lock` makes it.
        number: Number of the checkpoint that was read or written last.
    """

    path: str
    number: int = field(default=0, init=False)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager in which no other training writes to the folder.

        The kernel keeps the lock, and frees it when the process ends, however it ends;
        a process that the rank has forked does not have it.

        Raises:
            OSError: If the folder cannot be made or written to.
            RuntimeError: If another training has the lock.
        """
        os.makedirs(self.path, exist_ok=True)
        path = os.path.join(os.path.realpath(self.path), ".checkpoint.lock")
        if path in _locked:  # the kernel does not refuse a process its own lock
            raise self._make_error("another fit of this process", path)
        # Another account may have put a link there.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        end = time.monotonic() + TimeLimits().lock
        # For all accounts that may write to the folder, by the umask.
        with open(os.open(path, flags, 0o666), "r+") as file:
            try:
                while not _lock(file):
                    if time.monotonic() >= end:
                        raise self._make_error(file.read(4096), path)
                    time.sleep(1)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                warnings.warn(
                    "The file system of the folder that `resume` names has no locks: "
                    "nothing keeps another training from writing there as well. "
                    f"Received: resume={self.path!r}, {error}.",
                    stacklevel=2,
                )
            begin = time.strftime("%Y-%m-%d %H:%M:%S")
            holder = f"process {os.getpid()} on host {os.uname().nodename}, "
            file.truncate(0)
            file.write(f"{holder}since {begin}")
            file.flush()
            _locked.add(path)
            try:
                yield
            finally:
                _locked.remove(path)

    def _make_error(self, holder: str, path: str) -> RuntimeError:
        return RuntimeError(
            "Another training writes to the folder that `resume` names. Received: "
            f"resume={self.path!r}, locked in {path} by {holder or 'a process'}. Wait "
            "for its end, or pass another folder. If its host is gone, a file server "
            "gives the lock back after some time: for how many seconds to wait for it, "
            "set KERAS_DIST_LOCK_SECONDS"
        )

    def newest(self) -> tuple[Any, list[str]]:
        """Read the newest checkpoint that is not damaged.

        Returns:
            Its value, `None` if there is no checkpoint; and a line for each newer
            checkpoint that is damaged.

        Raises:
            DamagedError: If there are checkpoints, and all of them are damaged.
            OSError: If a file cannot be read, which does not mean that it is damaged:
                training from an older one would overwrite it.
        """
        damaged: list[str] = []
        for number in sorted(self.numbers(), reverse=True):
            path = self.file(number)
            try:
                value = read(path)
            except DamagedError as error:
                damaged.append(f"{path}: {error}")
                continue
            self.number = number
            return value, damaged
        if damaged:
            raise DamagedError(
                "No checkpoint in the folder can be read. Received: "
                f"{'; '.join(damaged)}. Restore a copy of one, or move these files "
                "away to train from the beginning."
            )
        return None, damaged

    def write(self, value: Any) -> str:
        """Write a checkpoint, and then remove those older than the last two.

        It is a file of `numpy.savez`, and a last line with its checksum.

        Args:
            value: A value that `to_json` returned, or that it does not need to change.

        Returns:
            The path of the file.

        Raises:
            OSError: If it cannot be written. Earlier checkpoints are still there then.
        """
        text, arrays = _to_text(value)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.part)  # a link is never followed
            with open(self.part, "x+b") as file:
                np.savez(file, *arrays, header=np.frombuffer(text, np.uint8))
                file.seek(0)
                found = hashlib.file_digest(file, "sha256").hexdigest()
                file.write(_LAST_LINE + found.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(self.part)
            raise
        number = self.number + 1
        os.replace(self.part, self.file(number))
        descriptor = os.open(self.path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some file systems do not support this
            os.fsync(descriptor)  # the new name is on the disk
        os.close(descriptor)
        self.number = number
        numbers = self.numbers()
        last = sorted(n for n in numbers if n <= number)[-KEPT:]
        for other in set(numbers) - set(last):
            with contextlib.suppress(OSError):
                os.remove(self.file(other))
        return self.file(number)

    @property
    def part(self) -> str:
        """Path of the file that is being written."""
        return os.path.join(self.path, _PART)

    def file(self, number: int) -> str:
        """Path of the checkpoint with a number."""
        return os.path.join(self.path, f"checkpoint-{number:08d}.keras_dist")

    def numbers(self) -> list[int]:
        """Numbers of the checkpoints in the folder, in no order."""
        matches = map(_NAME.fullmatch, os.listdir(self.path))
        return [int(match[1]) for match in matches if match]


def _lock(file: IO[str]) -> bool:
    """Lock a file, if nobody else has locked it; return whether it is locked."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def read(path: str) -> Any:
    """Read the value that was written to a file; tuples and numbers of NumPy, too.

    Raises:
        DamagedError: If it is not as it was written.
        OSError: If it cannot be read, also after some seconds.
    """
    content, last_line = _read_patiently(path)
    if not last_line.startswith(_LAST_LINE):
        raise DamagedError(
            "it does not end as a checkpoint of format 3 does, which this version of "
            "keras_dist reads"
        )
    found = hashlib.sha256(content).hexdigest().encode()
    if last_line != _LAST_LINE + found + b"\n":
        num_bytes = len(content) + _LAST_BYTES
        raise DamagedError(f"its {num_bytes} bytes do not match its checksum")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return _from_text(arrays["header"].tobytes(), arrays)
    except MemoryError:
        raise
    # With a valid checksum and any content, of which reading raises anything.
    except Exception as error:
        raise DamagedError(f"it is not a checkpoint ({error})") from None


def _read_patiently(path: str) -> tuple[bytes, bytes]:
    """Return all of a file but its last line, and that line."""
    waits = list(_WAITS)
    while True:
        try:
            with open(path, "rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                return file.read(max(0, num_bytes - _LAST_BYTES)), file.read()
        except OSError as error:
            if not waits:
                error.filename = path  # which an error of `file.read` does not have
                raise
            time.sleep(waits.pop(0))


def to_json(value: Any) -> Any:
    """Turn a value of Python into what JSON has, and arrays, which are copied.

    Objects whose only key begins with `$` stand for what JSON does not have.

    Raises:
        TypeError: If `value` is not a number, text, `None`, an array, or a list, tuple
            or dict of these.

    >>> to_json({"best": (1, [0.5])})
    {'best': {'$tuple': [1, [0.5]]}}
    """
    if type(value) in (type(None), bool, int, float, str):
        return value
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {"$scalar": np.array(value)}
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if type(value) is list:
        return [to_json(part) for part in value]
    if type(value) is tuple:
        return {"$tuple": [to_json(part) for part in value]}
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_json(part) for key, part in value.items()}
        return {"$items": [[to_json(k), to_json(v)] for k, v in value.items()]}
    raise TypeError(
        "Only numbers, text, None, NumPy arrays, and lists, tuples and dicts of "
        f"these, can be saved in a checkpoint. Received: {value!r}"
    )


def digest(value: Any) -> bytes:
    """Return a digest that is the same for equal values of `to_json`."""
    text, arrays = _to_text(value)
    found = hashlib.sha256(text)
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.tobytes())
    return found.digest()


def _to_text(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """Serialize a value as JSON, with numbers in place of arrays, and these arrays."""
    arrays: list[np.ndarray] = []

    def place(array: np.ndarray) -> dict[str, Any]:
        arrays.append(array)
        if array.dtype.isbuiltin != 2:
            return {"$array": len(arrays) - 1}
        # NumPy does not write the name of a dtype of `ml_dtypes`, such as bfloat16.
        arrays[-1] = array.view(f"u{array.dtype.itemsize}")
        return {"$array": len(arrays) - 1, "dtype": array.dtype.name}

    text = json.dumps(value, default=place).encode()
    return text, arrays


def _from_text(text: bytes, arrays: Any) -> Any:
    """Invert `to_json` and `_to_text`."""

    def restore(found: dict[str, Any]) -> Any:
        match found:
            case {"$array": number}:
                array = arrays[f"arr_{number}"]
                return array.view(found["dtype"]) if "dtype" in found else array
            case {"$scalar": array}:
                return array[()]
            case {"$tuple": parts}:
                return tuple(parts)
            case {"$items": pairs}:
                return dict(pairs)
        return found

    return json.loads(text, object_hook=restore)
