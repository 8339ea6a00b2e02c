"""The user's callbacks: which run on the first rank only, and their errors on all."""

import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from keras_dist import comm, mixin
from keras_dist.data.draws import preserve_generators, preserve_states
from keras_dist.data.source import run_alone
from keras_dist.lines import warn
from keras_dist.optimizer.step_context import Request
from keras_dist.training.session import session_of
from keras_dist.training.step import batch_logs
from keras_dist.training.turns import list_states

Marked = TypeVar("Marked")

# Every rank has the same weights and logs, and two processes that write the same file
# damage it. Older versions of Keras have no `OrbaxCheckpoint`.
_WRITING_CALLBACKS = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "BackupAndRestore",
        "CSVLogger",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "ProgbarLogger",
        "RemoteMonitor",
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)

# Packages whose callbacks log to a run: one job is one run. They are known by name,
# since most of them are not installed.
_TRACKERS = frozenset(
    {
        "clearml",
        "comet_ml",
        "mlflow",
        "neptune",
        "neptune_tensorflow_keras",
        "wandb",
    }
)


def first_rank_only(callback: Marked) -> Marked:
    """Mark your own callback to run on the first rank only.

    Use this for a callback that writes a file, sends a message or prints. Keras's
    callbacks that write, callbacks of MLflow, Weights & Biases, Comet, Neptune and
    ClearML, and their subclasses run on the first rank without a mark; all other
    callbacks run on all ranks. A marked callback takes part in no collective:
    `model.evaluate` in it evaluates the given rows on this rank only, and its changes
    to the model or the logs do not reach the other ranks.

    Args:
        callback: A `keras.callbacks.Callback`, or a subclass.

    Returns:
        The same object.

    Example:

    >>> class Diary(keras.callbacks.Callback):
    ...     def on_epoch_end(self, epoch, logs=None):
    ...         print(epoch, logs)
    >>> runs_on_first_rank_only(first_rank_only(Diary()))
    True
    """
    callback._keras_dist_first_rank_only = True  # type: ignore[attr-defined]
    return callback


def is_writer(callback: Any) -> bool:
    """Return True if it writes, and is of Keras or of an experiment tracker."""
    is_keras = isinstance(callback, _WRITING_CALLBACKS)
    return is_keras or is_tracker(callback)


def is_tracker(callback: Any) -> bool:
    """Return True if its class, or one that this inherits from, is of a tracker."""
    packages = {c.__module__.partition(".")[0] for c in type(callback).__mro__}
    return not _TRACKERS.isdisjoint(packages)


def runs_on_first_rank_only(callback: Any) -> bool:
    """Return True if `callback` writes, or was marked with `first_rank_only`."""
    is_marked = getattr(callback, "_keras_dist_first_rank_only", False)
    return is_writer(callback) or bool(is_marked)


def runs_here(callback: Any) -> bool:
    """Return True if this rank runs `callback`."""
    return comm.rank() == 0 or not runs_on_first_rank_only(callback)


@contextlib.contextmanager
def autolog_once() -> Iterator[None]:
    """Context manager in which a `fit` is autologged on the first rank only.

    `mlflow.autolog()` replaces `keras.Model.fit` by a function that begins a run, adds
    a callback and saves the model, after `dist_fit` has decided which callbacks run on
    this rank. MLflow itself turns that function off on the other ranks, here.
    """
    autologging = sys.modules.get("mlflow.utils.autologging_utils")
    if autologging is None or comm.rank() == 0:
        yield
        return
    with autologging.disable_autologging():
        yield


# Entries of a list that other ranks get: what is longer is data, and no result.
_MOST_ENTRIES = 10_000

_ON_ALL_RANKS = tuple(
    f"on_{kind}_{moment}"
    for kind in ("train", "epoch", "test")
    for moment in ("begin", "end")
)
_BATCHES = tuple(
    f"on_{kind}_batch_{moment}"
    for kind in ("train", "test")
    for moment in ("begin", "end")
)


class UserCallbacks(keras.callbacks.Callback):
    """Calls the user's callbacks in their order; if one raises, all ranks raise.

    At the beginning and the end of training, epochs and evaluations, the callbacks run
    in phases: one that may read a file is in a later phase than those before it that
    write. After each phase the ranks wait for one another: files that the first rank
    has written exist before the other ranks read them.

    At the end of a batch, the logs of one process are exchanged if a callback of all
    ranks reads them, and then a stop by which it has decided.

    Args:
        given: The callbacks, as the user passed them on this rank.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self.given = list(given)
        self._shared_logs: set[str] = set()  # hooks whose logs are of all ranks
        # Numbered from the last phase, so that the numbers fit on all ranks if only the
        # first rank was given a callback that writes.
        phases = reversed(_phases(self.given))
        self._phases = [list(filter(runs_here, phase)) for phase in phases]
        self._members = [c for phase in reversed(self._phases) for c in phase]
        self._num_phases = 0
        for hook in _ON_ALL_RANKS:
            setattr(self, hook, functools.partial(self._call_on_all, hook))
        for hook in _BATCHES:
            called = [c for c in self._members if _find_override(c, hook) is not None]
            if called:  # with a hook, Keras waits for each batch
                setattr(
                    self, hook, functools.partial(self._call_in_batch, called, hook)
                )

    def set_params(self, params: dict[str, Any] | None) -> None:
        super().set_params(params)
        for callback in self._members:
            callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        for callback in self._members:
            callback.set_model(model)
        # The ranks' callbacks may differ: every rank takes part in the exchange of each
        # phase that any rank has.
        count = len(self._phases) if self._members else 0
        paths = [callback.filepath for callback in _checkpoints(self.given)]
        hooks = {h for h in _BATCHES for c in self._members if _reads_logs(c, h)}
        counts, paths_by_rank, hooks_by_rank = zip(
            *comm.gather((count, paths, hooks)), strict=True
        )
        _use_first_paths(self.given, paths_by_rank)
        self._num_phases = max(counts)
        self._shared_logs = set.intersection(*hooks_by_rank)
        if comm.rank() == 0 and any(h != self._shared_logs for h in hooks_by_rank):
            warn(
                "Callbacks read the logs of batches on some ranks only, so these logs "
                f"are of one rank's rows. Received: {list(map(sorted, hooks_by_rank))}."
                " Pass such callbacks on all ranks; one that prints or writes may "
                "return early on the others."
            )

    def _call_in_batch(
        self, callbacks: Sequence[Any], hook: str, batch: int, logs: Any = None
    ) -> None:
        if hook in self._shared_logs:
            logs = batch_logs(self.model, logs)
        self._call(callbacks, hook, batch, logs=logs)
        if hook in self._shared_logs and "train" in hook:
            # As on one process: not after the next update, which tells other requests.
            requests = session_of(self.model).traced.requests
            if any(comm.gather(requests.asked == Request.STOP)):
                requests.agree(True)

    def _call_on_all(self, hook: str, *args: Any, **kwargs: Any) -> None:
        for index in reversed(range(self._num_phases)):
            phase = self._phases[index] if index < len(self._phases) else ()
            with comm.wait_for_all_ranks():
                self._call(phase, hook, *args, **kwargs)
        if hook == "on_train_end":
            self._share_attributes()

    def _share_attributes(self) -> None:
        """Let all ranks read what callbacks of the first rank know after the fit.

        Such as `best` of a `ModelCheckpoint`, by which a script may decide.
        """
        alone = [c for c in self.given if runs_on_first_rank_only(c)]
        alone = [c for c in alone if not is_tracker(c)]
        names = [type(callback).__name__ for callback in alone]
        first = names, [_plain_attributes(callback) for callback in alone]
        first_names, attributes = comm.broadcast(first)
        if comm.rank() > 0 and names == first_names:
            for callback, found in zip(alone, attributes, strict=True):
                vars(callback).update(found)

    def _call(
        self, callbacks: Sequence[Any], hook: str, *args: Any, **kwargs: Any
    ) -> None:
        requests = session_of(self.model).traced.requests
        with _silent_on_other_ranks(), mixin.change(requests, is_shown=True):
            for callback in callbacks:
                with self._scope_of(callback, hook):
                    getattr(callback, hook)(*args, **kwargs)

    @contextlib.contextmanager
    def _scope_of(self, callback: Any, hook: str) -> Iterator[None]:
        """Context for a callback; on the first rank only, it has no collectives."""
        if not runs_on_first_rank_only(callback):
            yield
            return
        session = session_of(self.model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(run_alone())
            stack.enter_context(mixin.change(session, sums_metrics=False))
            stack.enter_context(comm.without_collectives())
            # The next random numbers have to be the same on all ranks.
            stack.enter_context(preserve_generators())
            if "batch" not in hook:  # too slow for each batch
                states = list_states(self.model, session.traced.noise)
                stack.enter_context(preserve_states(states))
            yield


def _plain_attributes(callback: Any) -> dict[str, Any]:
    """Return the public attributes that are numbers, text, or collections of these."""
    return {
        name: value
        for name, value in vars(callback).items()
        if not name.startswith("_") and name != "params" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return len(value) <= _MOST_ENTRIES and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _checkpoints(callbacks: Sequence[Any]) -> list[Any]:
    return [c for c in callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]


def _use_first_paths(callbacks: Sequence[Any], paths: Sequence[list[str]]) -> None:
    """Set the path of each `ModelCheckpoint` to that of the first rank, which writes.

    Args:
        callbacks: The callbacks of this rank.
        paths: The paths of each rank.
    """
    if len(set(map(len, paths))) > 1:
        return  # only some ranks were given them
    for callback, path in zip(_checkpoints(callbacks), paths[0], strict=True):
        callback.filepath = path
    if comm.rank() == 0 and any(other != paths[0] for other in paths):
        rank = next(k for k, other in enumerate(paths) if other != paths[0])
        warn(
            "The path of a ModelCheckpoint differs between the ranks. The first rank "
            f"writes, to its own path. Received: {paths[0]} on rank 0, {paths[rank]} "
            f"on rank {rank}. To read the file on every rank, make the path once: "
            "`path = keras_dist.broadcast(path)`."
        )


@contextlib.contextmanager
def _silent_on_other_ranks() -> Iterator[None]:
    """Keep Keras's callbacks from printing on all ranks but the first."""
    is_quiet = comm.rank() != 0 and keras.config.is_interactive_logging_enabled()
    if is_quiet:
        keras.config.disable_interactive_logging()
    try:
        yield
    finally:
        if is_quiet:
            keras.config.enable_interactive_logging()


def reads_batch_logs(callback: Any) -> bool:
    """Return True if a callback of all ranks reads the logs at the end of batches."""
    return any(_reads_logs(callback, hook) for hook in _BATCHES)


def _reads_logs(callback: Any, hook: str) -> bool:
    """Return True if a hook of the user's, on all ranks, may read its logs.

    Keras passes them as `logs`: a function that never loads that name does not.
    """
    if not hook.endswith("_end") or not _may_read(callback):
        return False
    override = _find_override(callback, hook)
    code = getattr(override, "__code__", None)
    if code is None:  # no override, or one that is no function
        return override is not None
    loads = [i.argval for i in dis.get_instructions(code) if "LOAD" in i.opname]
    has_more = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return has_more or any(
        "logs" in (names if isinstance(names, tuple) else [names]) for names in loads
    )


def _phases(given: Sequence[Any]) -> list[list[Any]]:
    """Divide callbacks into phases: one that may read comes after a writer's."""
    phases: list[list[Any]] = [[]]
    for callback in given:
        if _may_read(callback) and any(map(runs_on_first_rank_only, phases[-1])):
            phases.append([])
        phases[-1].append(callback)
    return phases


def _may_read(callback: Any) -> bool:
    """Return True if it runs on all ranks and may read files."""
    is_keras = type(callback).__module__.split(".")[0] == "keras"
    is_users = not is_keras or isinstance(callback, keras.callbacks.LambdaCallback)
    return is_users and not runs_on_first_rank_only(callback)


def _find_override(callback: Any, hook: str) -> Any:
    """Find what overrides a hook, or its older name `on_batch_…`; `None` if nothing."""
    names = [hook, hook.replace("on_train_batch", "on_batch")]
    for name in dict.fromkeys(names):
        found = getattr(callback, name, None)
        own = getattr(found, "__func__", found)
        if own is not getattr(keras.callbacks.Callback, name):
            return own
    return None
