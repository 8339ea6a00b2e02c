"""Files of checkpoints: written and read whole, and structures of arrays as bytes."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_dist.training.saving.atomic import new_file

_FIRST_LINE = b"keras_dist checkpoint 2\n"
_START_BYTES = len(_FIRST_LINE) + 65  # with the checksum and its line feed
_NAME = re.compile(r"checkpoint-(\d{8,})\.keras_dist")
_PART = ".checkpoint.part"  # the file that is being written
_FULL = (errno.ENOSPC, errno.EDQUOT)

# What reading a file raises that was made on purpose: with a valid checksum and any
# content, also lists in lists in lists.
_FORGED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class DamagedError(ValueError):
    """The content of a file is not that of a checkpoint as it was written."""


@dataclass
class Folder:
    """A folder of checkpoints; only one process writes to it at a time.

    Args:
        path: Path of the folder. `prepare` makes it.
        keep: Number of checkpoints to keep; older ones are removed.
        number: Number of the checkpoint that was read or written last.
    """

    path: str
    keep: int = 2
    number: int = field(default=0, init=False)

    def prepare(self) -> None:
        """Make the folder, and check that a file can be written in it.

        Raises:
            OSError: If the folder cannot be made or written to.
        """
        os.makedirs(self.path, exist_ok=True)
        _write(self.part, [b"\0" * 4096])
        os.remove(self.part)

    def reserve(self, num_bytes: int) -> None:
        """Check that there is enough disk space for the checkpoints to keep.

        Args:
            num_bytes: Approximate size of one checkpoint.

        Raises:
            OSError: If there is too little space.
        """
        missing = max(1, self.keep - len(self.numbers()))
        with _removed_after_error(self.part), new_file(self.part) as file:
            try:
                # Allocate one checkpoint, and compare the rest with the free space: one
                # file of the size of all might exceed the largest file size allowed.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                free = os.fstatvfs(file.fileno())
            except OSError as error:  # some file systems do not support this
                if error.errno in (*_FULL, errno.EFBIG):
                    raise
                return
        os.remove(self.part)
        if free.f_blocks and free.f_bavail * free.f_frsize < (missing - 1) * num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def newest(self) -> tuple[Any, list[str]]:
        """Read the newest checkpoint that is not damaged.

        Returns:
            Its tree, `None` if there is no checkpoint; and a line for each newer
            checkpoint that is damaged.

        Raises:
            DamagedError: If there are checkpoints, and all of them are damaged.
        """
        damaged: list[str] = []
        for number in sorted(self.numbers(), reverse=True):
            path = self.file(number)
            try:
                tree = read(path)
            except (DamagedError, OSError) as error:
                damaged.append(f"{path}: {error}")
                continue
            self.number = number
            return tree, damaged
        if damaged:
            raise DamagedError(
                "No checkpoint in the folder can be read. Received: "
                f"{'; '.join(damaged)}. Restore a copy of one, or move these files "
                "away to train from the beginning."
            )
        return None, damaged

    def write(self, tree: Any) -> str:
        """Write a checkpoint, and then remove those older than the last `keep`.

        Args:
            tree: Dicts with text as keys, lists, text, numbers, `None` and arrays.

        Returns:
            The path of the file.

        Raises:
            OSError: If it cannot be written. Earlier checkpoints are still there then.
        """
        content = packed(tree)
        try:
            _write(self.part, content)
        except OSError as error:
            older = [n for n in sorted(self.numbers()) if n < self.number]
            if error.errno not in _FULL or not older:
                raise
            os.remove(self.file(older[0]))  # to make room
            _write(self.part, content)
        number = self.number + 1
        with _removed_after_error(self.part):
            os.replace(self.part, self.file(number))
        _sync_folder(self.path)
        self.number = number
        numbers = self.numbers()
        last = sorted(n for n in numbers if n <= number)[-self.keep :]
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


def packed(tree: Any) -> list[Any]:
    """Serialize a tree.

    Returns:
        The parts of a file, in order: first line, digest, head, JSON, and the bytes of
        each array. The head says how long the JSON is, and which arrays follow it.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_plain(tree, arrays)).encode()
    kinds = [{"shape": array.shape, "dtype": array.dtype.name} for array in arrays]
    head = json.dumps({"bytes": len(text), "arrays": kinds}).encode() + b"\n"
    body: list[Any] = [head, text, *(_bytes_of(array) for array in arrays)]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    return [_FIRST_LINE, digest.hexdigest().encode() + b"\n", *body]


def read(path: str) -> Any:
    """Read the tree that was written to a file.

    Raises:
        DamagedError, OSError: If it is not as it was written, or cannot be read.
    """
    with open(path, "rb") as file:
        start = file.read(_START_BYTES)
        content = file.read()
    if not start.startswith(_FIRST_LINE):
        raise DamagedError("it does not begin as a checkpoint of keras_dist does")
    digest = hashlib.sha256(content).hexdigest().encode()
    if digest + b"\n" != start[len(_FIRST_LINE) :]:
        num_bytes = len(start) + len(content)
        raise DamagedError(f"its {num_bytes} bytes do not match its checksum")
    try:
        return _unpacked(content)
    except _FORGED as error:
        raise DamagedError(f"it is not a checkpoint ({error})") from None


def _unpacked(content: bytes) -> Any:
    end = content.index(b"\n") + 1
    head = json.loads(content[:end])
    tree = json.loads(content[end : end + head["bytes"]])
    arrays, offset = [], end + head["bytes"]
    for kind in head["arrays"]:
        dtype = np.dtype(kind["dtype"])
        count = math.prod(kind["shape"])
        if count < 0:  # NumPy would read the whole rest of the file
            raise ValueError(f"an array has the shape {kind['shape']}")
        array = np.frombuffer(content, dtype, count, offset).reshape(kind["shape"])
        arrays.append(array.copy())  # aligned and writable
        offset += count * dtype.itemsize
    return _filled(tree, arrays)


def _plain(tree: Any, arrays: list[np.ndarray]) -> Any:
    """Turn a tree into JSON, with numbers in place of arrays, and collect these."""
    if isinstance(tree, np.ndarray):
        arrays.append(tree)
        return {"array": len(arrays) - 1}
    if isinstance(tree, list):
        return {"list": [_plain(part, arrays) for part in tree]}
    if isinstance(tree, dict):
        return {"dict": {key: _plain(part, arrays) for key, part in tree.items()}}
    return tree


def _filled(tree: Any, arrays: Sequence[Any]) -> Any:
    """Turn JSON into a tree, with the arrays in place of their numbers.

    Raises:
        One of `_FORGED`: If it is not the JSON of a tree.
    """
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "array":
        return arrays[value]
    if kind == "list":
        return [_filled(part, arrays) for part in value]
    return {key: _filled(part, arrays) for key, part in value.items()}


def _bytes_of(array: np.ndarray) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write(path: str, content: list[Any]) -> None:
    with _removed_after_error(path), new_file(path) as file:
        for part in content:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: str) -> None:
    """Wait until a rename in a folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems do not support this
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _removed_after_error(part: str) -> Iterator[None]:
    """Remove a file if the block raises an error."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


_PLAIN = (type(None), bool, int, float, str)


def encoded(value: Any) -> Any:
    """Encode a value as a tree that a checkpoint can hold; arrays are copied.

    Raises:
        TypeError: If `value` is not a number, text, `None`, an array, or a list, tuple
            or dict of these.

    >>> encoded((1, {"best": [0.5]}))
    {'tuple': [1, {'items': [['best', {'list': [0.5]}]]}]}
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic) and value.dtype.kind != "O":
        return {"scalar": np.array(value)}
    if type(value) is np.ndarray and value.dtype.kind != "O":
        return {"values": value.copy()}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encoded(part) for part in value]}
    if type(value) is dict:
        return {"items": [[encoded(k), encoded(v)] for k, v in value.items()]}
    raise TypeError(
        "Only numbers, text, None, NumPy arrays, and lists, tuples and dicts of "
        f"these, can be saved in a checkpoint. Received: {value!r}"
    )


def decoded(tree: Any) -> Any:
    """Decode a tree of `encoded`.

    >>> decoded(encoded((1, {"best": [0.5]})))
    (1, {'best': [0.5]})
    """
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "items":
        return {decoded(key): decoded(part) for key, part in value}
    if kind == "scalar":
        return value[()]
    if kind == "values":
        return value
    items = [decoded(item) for item in value]
    return items if kind == "list" else tuple(items)


def digest_of(tree: Any) -> bytes:
    """A digest that is the same for equal trees."""
    return packed(tree)[1]
