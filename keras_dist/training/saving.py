"""Save models: each file is replaced as a whole, and written once, by the first rank.

Scripts for one process end with `model.save(path)` or `save_model(model, path)`, which
all ranks then call at once, also before the ranks meet. So in a rank of several these
functions are changed when the package is imported (`install`).
The first rank must not wait for ranks that never save (`if keras_dist.rank() == 0:`),
so nothing here is a collective. It announces in the launcher's store what it writes,
and another rank that saves the same waits for that. Where nothing is announced (under
mpirun, or of a path that the first rank does not save), a rank writes the file itself,
so that it takes its place as a whole: no rule here can lose or damage one.
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import inspect
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import keras

from keras_dist import comm
from keras_dist.comm import World
from keras_dist.launch import monitor
from keras_dist.launch.store import client_of

# The name of the log in the store, and how many saves it keeps.
_NAME, _SAVES = "saves", 64

# How long a rank waits for the first rank to begin a save, and to finish one. After
# that it writes by itself.
_BEGIN_SECONDS, _WRITE_SECONDS = 5.0, 600.0

# The interval between two looks into the store grows from the first to the second.
# Of all ranks together there are at most so many a second.
_SHORTEST, _LONGEST, _LOOKS = 0.01, 0.25, 400.0

_logs: list["SaveLog"] = []
_inside = threading.local()


def install() -> None:
    """Let each function of Keras that saves a model do so once, on several ranks.

    Does nothing without a launcher, on one rank, and in processes that a rank starts.
    """
    world = comm.world_of_job()
    if world.size == 1 or comm.is_child_of_rank() or _logs:
        return
    _logs.append(SaveLog(world))
    atexit.register(_logs[0].end)
    # A process that this one forks would say at its own end that this rank has ended.
    unregister = functools.partial(atexit.unregister, _logs[0].end)
    os.register_at_fork(after_in_child=unregister)
    # `Model.save` and `Model.save_weights` call these functions.
    for function in (keras.saving.save_model, keras.saving.save_weights):
        _replace_code(function)
    archives = type(keras.export.ExportArchive())  # one for each of Keras's backends
    archive = next(c for c in archives.__mro__ if "write_out" in vars(c))
    for owner, name in ((keras.Model, "export"), (archive, "write_out")):
        setattr(owner, name, _share(vars(owner)[name]))


def begin_interval() -> None:
    """Count saves from 0: all ranks are here, as a fit begins or is over."""
    for log in _logs:
        log.begin_interval()


def _replace_code(function: Any) -> None:
    """Let a function be shared also where a module has imported it by its name."""
    parts = (function.__name__, function.__defaults__)
    own = types.FunctionType(function.__code__, function.__globals__, *parts)
    function.__code__ = _call_shared.__code__
    function.__kwdefaults__ = {"_shared": _share(own)}


def _call_shared(*args: Any, _shared: Any, **kwargs: Any) -> Any:
    return _shared(*args, **kwargs)


def _share(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `own`, which saves its first argument, to be called where it has to be."""

    @functools.wraps(own)
    def save(*args: Any, **kwargs: Any) -> Any:
        call = _bind(own, args, kwargs)
        if (
            call is None
            or isinstance(call.args[0], SavesWhole)  # during its fit
            or getattr(_inside, "value", False)
            or comm.is_child_of_rank()
        ):
            return own(*args, **kwargs)
        _inside.value = True
        try:
            return _logs[0].save(own, call)
        finally:
            _inside.value = False

    return save


class SavesWhole:
    """Mixin for a model: `save` and `save_weights` replace a file as a whole."""

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _save_whole(super().save, self, args, kwargs)  # type: ignore[misc]

    def save_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _save_whole(super().save_weights, self, args, kwargs)  # type: ignore[misc]


def _save_whole(own: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
    call = _bind(own, args, kwargs)
    return own(*args, **kwargs) if call is None else _write(own, call, model)


def _bind(
    own: Callable[..., Any], args: Any, kwargs: Any
) -> inspect.BoundArguments | None:
    """Bind the arguments of a save; `None` if it is to no path, or Keras refuses it."""
    with contextlib.suppress(TypeError):
        call = inspect.signature(own).bind(*args, **kwargs)
        if isinstance(call.arguments.get("filepath"), (str, os.PathLike)):
            return call
    return None


def _write(own: Callable[..., Any], call: inspect.BoundArguments, model: Any) -> Any:
    """Let `own` write, so that what other ranks write there at once stays whole."""
    given, path = call.arguments, call.arguments["filepath"]

    def write_to(other: str) -> Any:
        there = inspect.BoundArguments(call.signature, given | {"filepath": other})
        if "overwrite" in call.signature.parameters:
            there.arguments["overwrite"] = True
        return own(*there.args, **there.kwargs)

    asks_user = not given.get("overwrite", True) and os.path.exists(path)
    is_one_file = "overwrite" in call.signature.parameters and not (
        given.get("zipped") is False or given.get("max_shard_size")
    )
    if asks_user or is_remote(path) or (is_one_file and not is_replaceable(path)):
        return own(*call.args, **call.kwargs)
    if is_one_file:
        return replace(path, write_to, num_bytes=hdf5_size(model, path))
    return merge(path, write_to)


class SaveLog:
    """Counts the saves that this rank has reached; the first rank announces its own.

    A save is known by its name (what saves, after how many updates, and to which path),
    the interval between two fits in which it is made, and its number among saves of the
    same name. So a file that the first rank has written before is not taken for the one
    that it is about to write.

    Args:
        world: This rank, and the number of ranks.
    """

    def __init__(self, world: World) -> None:
        self._store, self._is_first = client_of(), world.is_first
        self._longest = max(_LONGEST, world.size / _LOOKS)
        self._interval = 0
        self._numbers: dict[str, int] = {}
        self._saves: dict[str, dict[str, Any]] = {}

    def begin_interval(self) -> None:
        """Count saves from 0 again; all ranks do so at the same point."""
        self._interval += 1
        self._numbers.clear()
        self._announce()

    def end(self) -> None:
        """Note that this process ends."""
        self._interval = sys.maxsize
        self._announce()

    def save(self, own: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        """Let this rank write, or wait for the first rank to do so.

        Args:
            own: Keras's function.
            call: Its arguments, with a `filepath`.
        """
        model, path = call.args[0], os.fspath(call.arguments["filepath"])
        path = path if is_remote(path) else os.path.realpath(path)
        made = getattr(getattr(model, "optimizer", None), "iterations", None)
        name = f"{own.__name__} {'' if made is None else int(made)} {path}"
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        key = f"{self._interval} {name}"
        if not self._is_first:
            is_there = self._is_written(key, number, path)
            return None if is_there else _write(own, call, model)
        self._saves.pop(key, None)  # the newest is the last one
        self._saves[key] = {"number": number, "state": "writing"}
        for old in list(self._saves)[:-_SAVES]:
            del self._saves[old]
        self._announce()
        state = "failed"
        try:
            if self._store is not None and "overwrite" not in call.signature.parameters:
                # Others do not export, and Keras prints the path that the user passed.
                result = own(*call.args, **call.kwargs)
            else:
                result = _write(own, call, model)
            state = "written"
        finally:
            self._saves[key] = {"number": number, "state": state, **_describe(path)}
            self._announce()
        return result

    def _announce(self) -> None:
        if self._is_first and self._store is not None:
            total = sum(self._numbers.values())
            log = {"interval": self._interval, "total": total, "saves": self._saves}
            self._store.put(_NAME, log)

    def _is_written(self, key: str, number: int, path: str) -> bool:
        """Wait for the first rank to make the same save; return True if it is here."""
        total = sum(self._numbers.values())
        # Long before the watchdog may think that nobody works.
        begin_seconds = min(_BEGIN_SECONDS, (monitor.limit_of() or 120.0) / 4)
        start, pause = time.monotonic(), _SHORTEST
        while self._store is not None:
            log = self._store.get(_NAME) or {}
            save = log.get("saves", {}).get(key, {"number": 0})
            has_begun = save["number"] >= number
            if has_begun and save["state"] == "failed":
                return False  # this rank tries, and has its own error
            if has_begun and save["state"] == "written":
                here = _describe(path)
                if save["host"] == here["host"]:
                    return is_remote(path) or here["stat"] is not None
                return bool(save["stat"] == here["stat"])
            # The first rank has gone on, and not by way of this save.
            position = log.get("interval", 0), log.get("total", 0)
            limit = _WRITE_SECONDS if has_begun else begin_seconds
            is_past = not has_begun and position >= (self._interval, total)
            if is_past or time.monotonic() - start > limit:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, self._longest)
        return False


def _describe(path: str) -> dict[str, Any]:
    """Describe a file, so that another host can see whether it has the same one."""
    stat = None
    with contextlib.suppress(OSError):
        found = os.stat(path)
        stat = [found.st_size, found.st_mtime_ns]
    return {"host": socket.gethostname(), "stat": stat}


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
