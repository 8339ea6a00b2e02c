"""A model that all ranks save is written once, by the first rank.

The first rank must not wait for ranks that never save (`if keras_dist.rank() == 0:`),
so nothing here is a collective. It announces in the launcher's store what it writes,
and another rank that saves the same waits for that. Where nothing is announced (under
mpirun, or of a path that the first rank does not save), a rank writes the file itself,
so that it takes its place as a whole: no rule here can lose or damage one.
"""

import atexit
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dist import comm
from keras_dist.training import atomic_save
from keras_dist.training.save_log import FirstRankLog, SaveLog

# What saves a model, by the class that has it or as a function of `keras.saving`.
_METHODS = (
    (keras.Model, "save"),
    (keras.Model, "save_weights"),
    (keras.Model, "export"),
)
_FUNCTIONS = ("save_model", "save_weights")

_logs: list[SaveLog] = []
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
    """All ranks are here: a fit begins or is over, and what was saved is done with."""
    for log in _logs:
        log.begin_interval()


def _variables_of_modules() -> Iterator[dict[str, Any]]:
    for name, module in list(sys.modules.items()):
        # Keras itself calls its own functions in methods that are replaced as well.
        if module is not None and not name.startswith("keras.src"):
            # Not `vars`: a module that is loaded when it is used would be loaded.
            yield object.__getattribute__(module, "__dict__")


def _by_first_rank(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, which saves its first argument, but called where it has to be."""
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
    """Whether other ranks may save to this path, and nothing else sees to that."""
    return (
        isinstance(call.arguments.get("filepath"), (str, os.PathLike))
        and not isinstance(call.args[0], atomic_save.SavesWhole)  # during its fit
        and not getattr(_inside, "value", False)
        and not comm.is_child_of_rank()
    )


def _saved(own: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    log, path = _logs[0], os.fspath(call.arguments["filepath"])
    if not atomic_save.is_remote(path):
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
    if is_prompt or atomic_save.is_remote(path):
        return own(*call.args, **call.kwargs)
    is_export = "overwrite" not in call.signature.parameters
    if is_export and is_announced:
        # Others do not write, and Keras prints the path that the user has passed.
        return own(*call.args, **call.kwargs)
    if not is_export and _is_one_file(call) and atomic_save.is_replaceable(path):
        size = atomic_save.hdf5_size(call.args[0], path)
        return atomic_save.replace(path, write_to, num_bytes=size)
    return atomic_save.merge(path, write_to)


def _is_one_file(call: inspect.BoundArguments) -> bool:
    is_folder = call.arguments.get("zipped") is False
    return not is_folder and not call.arguments.get("max_shard_size")
