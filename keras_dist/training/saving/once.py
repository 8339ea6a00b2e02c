"""A model that all ranks save is written once, by the first rank.

The first rank must not wait for ranks that never save (`if keras_dist.rank() == 0:`),
so nothing here is a collective. It announces in the launcher's store what it writes,
and another rank that saves the same waits for that. Where nothing is announced (under
mpirun, or of a path that the first rank does not save), a rank writes the file itself,
so that it takes its place as a whole: no rule here can lose or damage one.

Callbacks and `first_rank()` cannot do this alone: scripts for one process end with
`model.save(path)` or `save_model(model, path)`, which all ranks then call at once. So
those functions of Keras are replaced when the package is imported, also in modules
that have imported them by name before (`install`). No other change outlives a fit.
"""

import atexit
import functools
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dist import comm, private
from keras_dist.comm import World
from keras_dist.launch import monitor
from keras_dist.launch.store import StoreClient, client_of
from keras_dist.training.saving import atomic

# What saves a model, by the class that has it or as a function of `keras.saving`.
_METHODS = (
    (keras.Model, "save"),
    (keras.Model, "save_weights"),
    (keras.Model, "export"),
)
_FUNCTIONS = ("save_model", "save_weights")

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
    Functions that were imported before, as by `from keras.saving import save_model`,
    are replaced in the modules that have them.
    """
    world = comm.world_of_job()
    if world.size == 1 or comm.is_child_of_rank() or _logs:
        return
    _logs.append(SaveLog.of(world))
    atexit.register(_logs[0].end)
    # A process that this one forks would say at its own end that this rank has ended.
    unregister = functools.partial(atexit.unregister, _logs[0].end)
    os.register_at_fork(after_in_child=unregister)
    archives = type(keras.export.ExportArchive())  # one for each of Keras's backends
    archive = next(c for c in archives.__mro__ if "write_out" in vars(c))
    for owner, name in (*_METHODS, (archive, "write_out")):
        setattr(owner, name, _by_first_rank(getattr(owner, name)))
    for own in filter(None, (getattr(keras.saving, n, None) for n in _FUNCTIONS)):
        shared = _by_first_rank(own)
        for variables in list(_variables_of_modules()):
            for name in [n for n, value in variables.items() if value is own]:
                variables[name] = shared


def begin_interval() -> None:
    """Count saves from 0: all ranks are here, as a fit begins or is over."""
    for log in _logs:
        log.begin_interval()


def _variables_of_modules() -> Iterator[dict[str, Any]]:
    for name, module in list(sys.modules.items()):
        # Keras itself calls its own functions in methods that are replaced as well.
        if module is not None and not name.startswith(private.MODULES):
            # Not `vars`: a module that is loaded when it is used would be loaded.
            yield object.__getattribute__(module, "__dict__")


def _by_first_rank(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `own`, which saves its first argument, to be called where it has to be."""
    signature = inspect.signature(own)

    @functools.wraps(own)
    def save(*args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError:  # Keras's own words for it
            return own(*args, **kwargs)
        if not _is_common(call):
            return own(*args, **kwargs)
        _inside.value = True
        try:
            return _saved(own, call)
        finally:
            _inside.value = False

    return save


def _is_common(call: inspect.BoundArguments) -> bool:
    """Tell whether other ranks may save to this path, and nothing else handles that."""
    return (
        isinstance(call.arguments.get("filepath"), (str, os.PathLike))
        and not isinstance(call.args[0], atomic.SavesWhole)  # during its fit
        and not getattr(_inside, "value", False)
        and not comm.is_child_of_rank()
    )


def _saved(own: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    log, path = _logs[0], os.fspath(call.arguments["filepath"])
    if not atomic.is_remote(path):
        path = os.path.realpath(path)
    made = getattr(getattr(call.args[0], "optimizer", None), "iterations", None)
    name = f"{own.__name__} {'' if made is None else int(made)} {path}"
    if isinstance(log, FirstRankLog):
        return log.written(name, path, lambda: _write(own, call, log.has_store))
    return None if log.has(name, path) else _write(own, call)


def _write(
    own: Callable[..., Any], call: inspect.BoundArguments, is_announced: bool = False
) -> Any:
    """Let `own` write, so that what other ranks write there at once stays whole."""
    path = call.arguments["filepath"]

    def write_to(other: str) -> Any:
        there = inspect.BoundArguments(call.signature, call.arguments.copy())
        there.arguments["filepath"] = other
        if "overwrite" in call.signature.parameters:
            there.arguments["overwrite"] = True
        return own(*there.args, **there.kwargs)

    is_prompt = not call.arguments.get("overwrite", True) and os.path.exists(path)
    if is_prompt or atomic.is_remote(path):
        return own(*call.args, **call.kwargs)
    is_export = "overwrite" not in call.signature.parameters
    if is_export and is_announced:
        # Others do not write, and Keras prints the path that the user has passed.
        return own(*call.args, **call.kwargs)
    if not is_export and _is_one_file(call) and atomic.is_replaceable(path):
        size = atomic.hdf5_size(call.args[0], path)
        return atomic.replace(path, write_to, num_bytes=size)
    return atomic.merge(path, write_to)


def _is_one_file(call: inspect.BoundArguments) -> bool:
    is_folder = call.arguments.get("zipped") is False
    return not is_folder and not call.arguments.get("max_shard_size")


class SaveLog:
    """Counts the saves that this rank has reached; on any rank but the first.

    A save is known by its name (what saves, after how many updates, and to which path),
    the interval between two fits in which it is made, and its number among saves of the
    same name. So a file that the first rank has written before is not taken for the one
    that it is about to write.

    Args:
        store: The launcher's store; `None` if it has none.
        size: Number of ranks.
    """

    def __init__(self, store: StoreClient | None, size: int = 1) -> None:
        self._store = store
        self._longest = max(_LONGEST, size / _LOOKS)
        self._interval = 0
        self._numbers: dict[str, int] = {}

    @staticmethod
    def of(world: World) -> "SaveLog":
        """Make the log of this rank."""
        store = client_of()
        return FirstRankLog(store) if world.is_first else SaveLog(store, world.size)

    @property
    def has_store(self) -> bool:
        """Tell whether the ranks can read what the first one announces."""
        return self._store is not None

    def begin_interval(self) -> None:
        """Count saves from 0 again; all ranks do so at the same point."""
        self._interval += 1
        self._numbers.clear()

    def end(self) -> None:
        """Note that this process ends."""

    def has(self, name: str, path: str) -> bool:
        """Wait for the first rank to make the same save; tell if its file is here.

        Args:
            name: Of the save, the same on all ranks.
            path: Of the file or folder; an address if it is not a local one.
        """
        key, number = self._count(name)
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
                return _is_here(path, save)
            # The first rank has gone on, and not by way of this save.
            position = log.get("interval", 0), log.get("total", 0)
            limit = _WRITE_SECONDS if has_begun else begin_seconds
            is_past = not has_begun and position >= (self._interval, total)
            if is_past or time.monotonic() - start > limit:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, self._longest)
        return False

    def _count(self, name: str) -> tuple[str, int]:
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        return f"{self._interval} {name}", number


class FirstRankLog(SaveLog):
    """The log of the first rank, which it puts into the store."""

    def __init__(self, store: StoreClient | None) -> None:
        super().__init__(store)
        self._saves: dict[str, dict[str, Any]] = {}

    def begin_interval(self) -> None:
        super().begin_interval()
        self._publish()

    def end(self) -> None:
        self._interval = sys.maxsize
        self._publish()

    def written(self, name: str, path: str, write: Callable[[], Any]) -> Any:
        """Make a save, and announce its beginning and its end.

        Args:
            name: Of the save, the same on all ranks.
            path: Of the file or folder; an address if it is not a local one.
            write: Makes the file.

        Returns:
            What `write` returns.
        """
        key, number = self._count(name)
        self._saves.pop(key, None)  # the newest is the last one
        self._saves[key] = {"number": number, "state": "writing"}
        for old in list(self._saves)[:-_SAVES]:
            del self._saves[old]
        self._publish()
        state = "failed"
        try:
            result = write()
            state = "written"
        finally:
            self._saves[key] = {"number": number, "state": state, **_found(path)}
            self._publish()
        return result

    def _publish(self) -> None:
        if self._store is not None:
            log = {
                "interval": self._interval,
                "total": sum(self._numbers.values()),
                "saves": self._saves,
            }
            self._store.put(_NAME, log)


def _found(path: str) -> dict[str, Any]:
    """Describe a file, so that another host can tell whether it sees the same one."""
    try:
        found = os.stat(path)
    except OSError:
        return {"host": socket.gethostname(), "stat": None}
    return {
        "host": socket.gethostname(),
        "stat": [found.st_size, found.st_mtime_ns],
    }


def _is_here(path: str, save: dict[str, Any]) -> bool:
    """Tell whether this host sees what the first rank has written."""
    here = _found(path)
    if save["host"] == here["host"]:
        return "://" in path or here["stat"] is not None
    return bool(save["stat"] == here["stat"])
