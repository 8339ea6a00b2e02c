"""Save models: each file is replaced as a whole, and written once, by the first rank.

Scripts for one process end with `model.save(path)` or `save_model(model, path)`, which
all ranks then call at once, also before the ranks meet. So under a launcher these
functions are changed when the package is imported (`install`).
The first rank must not wait for ranks that never save (`if keras_dist.rank() == 0:`),
so nothing here is a collective. It announces in the launcher's store what it writes,
and another rank that saves the same waits for that. Where nothing is announced (under
mpirun, or of a path that the first rank does not save), a rank writes the file itself,
so that it takes its place as a whole: no rule here can lose or damage one.
"""

import collections
import contextlib
import errno
import fcntl
import functools
import hashlib
import inspect
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm
from keras_dist.clusters import find_place
from keras_dist.comm import World
from keras_dist.launch.store import find_store
from keras_dist.launch.time_limits import TimeLimits

# The name in the store of how far the first rank has come.
_POSITION = "saves"

# How long a rank waits for the first rank to begin a save, and to finish one. After
# that it writes by itself.
_BEGIN_SECONDS, _WRITE_SECONDS = 5.0, 600.0

# The interval between two looks into the store grows from the first to the second.
# Of all ranks together there are at most so many a second, of two requests each.
_SHORTEST, _LONGEST, _LOOKS = 0.01, 0.25, 400.0

# Keras refuses other extensions of a file, with an error that names the path.
_EXTENSIONS = (".keras", ".h5", ".hdf5", ".json")

_logs: list["SaveLog"] = []
_inside = threading.local()


def install() -> None:
    """Let each function of Keras that saves a model do so once, under a launcher."""
    if find_place() is None or _logs:
        return
    _logs.append(SaveLog(comm.job_world()))
    # `Model.save` and `Model.save_weights` call these functions.
    for function in (keras.saving.save_model, keras.saving.save_weights):
        _replace(function)
    archives = type(keras.export.ExportArchive())  # one for each of Keras's backends
    archive = next(c for c in archives.__mro__ if "write_out" in vars(c))
    for owner, name in ((keras.Model, "export"), (archive, "write_out")):
        setattr(owner, name, _share(vars(owner)[name]))


def begin_interval() -> None:
    """Count saves from 0: all ranks are here, as a fit begins or is over."""
    for log in _logs:
        log.begin_interval()


def _replace(function: Any) -> None:
    """Share a function in all modules that hold it, by whatever name."""
    shared = _share(function)
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is function:
                setattr(module, name, shared)


def _share(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `own`, which saves its first argument, to be called where it has to be."""

    @functools.wraps(own)
    def save(*args: Any, **kwargs: Any) -> Any:
        call = None
        with contextlib.suppress(TypeError):  # Keras raises it, with its own words
            call = inspect.signature(own).bind(*args, **kwargs)
        is_path = call and isinstance(call.arguments.get("filepath"), str | os.PathLike)
        # A save inside of a save, such as that of an export.
        is_inner = getattr(_inside, "value", False)
        if call is None or not is_path or is_inner or comm.is_rank_child():
            return own(*args, **kwargs)
        _inside.value = True
        try:
            return _logs[0].save(own, call)
        finally:
            _inside.value = False

    return save


class SaveLog:
    """Counts the saves that this rank has reached; the first rank announces its own.

    A save is known by its name (what saves, after how many updates, to which path, and
    in which interval between two fits) and its number among saves of the same name. So
    a file that the first rank has written before is not taken for the one that it is
    about to write.
    """

    def __init__(self, world: World) -> None:
        self._store, self._is_first = find_store(), world.is_first
        self._longest = max(_LONGEST, world.size / _LOOKS)
        self._position = [0, 0]  # the interval, and the saves in it
        self._numbers: dict[str, int] = collections.Counter()

    def begin_interval(self) -> None:
        """Count saves from 0 again; all ranks do so at the same point."""
        self._position = [self._position[0] + 1, 0]
        self._numbers.clear()  # names have the number of the interval
        self._announce(_POSITION, self._position)

    def save(self, own: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        """Let this rank write by Keras's function, or wait for the first rank to."""
        path = os.fspath(call.arguments["filepath"])
        path = path if _is_remote(path) else os.path.realpath(path)
        model = call.args[0]
        updates = getattr(getattr(model, "optimizer", None), "iterations", None)
        count = None if updates is None else int(updates)
        text = f"{own.__name__} {count} {self._position[0]} {path}"
        name = f"{_POSITION}.{hashlib.sha256(text.encode()).hexdigest()}"
        self._numbers[name] += 1
        self._position[1] += 1
        number = self._numbers[name]
        if not self._is_first:
            return None if self._is_written(name, number, path) else _write(own, call)
        self._announce(name, {"number": number, "state": "writing"})
        self._announce(_POSITION, self._position)
        state = "failed"
        try:
            if self._store is not None and "overwrite" not in call.signature.parameters:
                # Others do not export, and Keras prints the path that the user passed.
                result = own(*call.args, **call.kwargs)
            else:
                result = _write(own, call)
            state = "written"
        finally:
            self._announce(name, {"number": number, "state": state, **_describe(path)})
        return result

    def _announce(self, name: str, value: Any) -> None:
        if self._is_first and self._store is not None:
            self._store.put(name, value)

    def _is_written(self, name: str, number: int, path: str) -> bool:
        """Wait for the first rank to make the same save; return True if it is here."""
        # Long before the watchdog may think that nobody works.
        begin_seconds = min(_BEGIN_SECONDS, (TimeLimits().stall or 120.0) / 4)
        start, pause = time.monotonic(), _SHORTEST
        while self._store is not None:
            position = self._store.get(_POSITION) or [0, 0]
            save = self._store.get(name) or {"number": 0}
            has_begun = save["number"] >= number
            if has_begun and save["state"] == "failed":
                return False  # this rank tries, and has its own error
            if has_begun and save["state"] == "written":
                here = _describe(path)
                if save["host"] != here["host"]:
                    return bool(save["stat"] == here["stat"])
                return _is_remote(path) or here["stat"] is not None
            # The first rank has gone on, and not by way of this save.
            is_past = not has_begun and position >= self._position
            limit = _WRITE_SECONDS if has_begun else begin_seconds
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


def _is_remote(path: str) -> bool:
    """Return True for an address, as `gs://…`, where files cannot be renamed."""
    return "://" in path


def _write(own: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    """Let `own` write in a folder of its own, and move each file from there as a whole.

    If the disk is full or the process is killed, the files are those from before, and
    several ranks that write the same path do not damage them. A folder that is not
    there yet is moved as a whole, and only if no other rank has done so in the
    meantime: the files of two ranks do not fit together. In one that is there, other
    files stay.
    """
    arguments, path = call.arguments, os.fspath(call.arguments["filepath"])
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    is_export = "overwrite" not in call.signature.parameters
    is_folder = is_export or arguments.get("zipped") is False
    is_there = os.path.exists(target)
    if is_export and not _is_remote(path):
        os.makedirs(folder, exist_ok=True)
    if (
        _is_remote(path)
        or (is_there and not arguments.get("overwrite", True))  # Keras asks the user
        or (is_there and os.path.isfile(target) == is_folder)
        or not (is_folder or path.endswith(_EXTENSIONS))
        or not os.path.isdir(folder)
    ):
        return own(*call.args, **call.kwargs)  # or Keras raises its own error
    with _make_draft(folder) as draft:
        made = os.path.join(draft, name)
        if path.endswith((".h5", ".hdf5")):
            _reserve(made, call.args[0])
        there = inspect.BoundArguments(call.signature, arguments | {"filepath": made})
        if not is_export:
            there.arguments["overwrite"] = True  # the draft
        result = own(*there.args, **there.kwargs)
        _sync_files(draft)  # before others wait, and before files there are replaced
        with _lock(folder):
            if is_there or not os.path.isdir(made):
                _move_files(draft, folder)
            elif not os.path.exists(target):
                os.rename(made, target)
    return result


@contextlib.contextmanager
def _make_draft(folder: str) -> Iterator[str]:
    """Context manager for a folder of this process: another job may save the path.

    It is locked. What a process of this host has left that was killed is removed.
    """
    prefix = f".keras_dist.{socket.gethostname()}."
    with contextlib.ExitStack() as stack:
        with _lock(folder):
            with contextlib.suppress(OSError):  # it cannot be read
                for name in os.listdir(folder):
                    if name[:-8] == prefix:  # `mkdtemp` adds eight characters
                        left = os.path.join(folder, name)
                        with contextlib.suppress(OSError), _lock(left, waits=False):
                            shutil.rmtree(left, ignore_errors=True)
            draft = tempfile.mkdtemp(prefix=prefix, dir=folder)
            stack.callback(shutil.rmtree, draft, ignore_errors=True)
            stack.enter_context(_lock(draft))
        yield draft


def _reserve(path: str, model: Any) -> None:
    """Raise if there is no room: HDF5 ends the process when a write fails."""
    found = getattr(model, "optimizer", None)
    variables = [*model.variables, *(found.variables if found is not None else ())]
    sizes = [tf.as_dtype(v.dtype).size * math.prod(v.shape) for v in variables]
    num_bytes = sum(sizes) + 2048 * len(sizes)  # HDF5 adds its headers
    with open(path, "xb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes + 1)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise


def _sync_files(draft: str) -> None:
    for folder, _, names in os.walk(draft):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:  # may be read-only
                os.fsync(file.fileno())


def _move_files(source: str, target: str) -> None:
    for folder, _, names in os.walk(source):
        there = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(there, exist_ok=True)
        for name in names:
            made, path = os.path.join(folder, name), os.path.join(there, name)
            with contextlib.suppress(OSError):  # keep the mode of the file before
                shutil.copymode(path, made)
            os.replace(made, path)


@contextlib.contextmanager
def _lock(folder: str, *, waits: bool = True) -> Iterator[None]:
    """Context manager in which other ranks that come here for this folder wait.

    Args:
        folder: The folder, which may be on a file system without locks.
        waits: `False`: it raises an `OSError` instead of waiting, or without locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError:
            if not waits:
                raise
        yield
    finally:
        with contextlib.suppress(OSError):  # else a process forked by now would keep it
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
