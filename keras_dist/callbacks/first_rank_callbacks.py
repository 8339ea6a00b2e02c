"""Callbacks that run on the first rank only: those that write, and marked ones."""

from collections.abc import Sequence
from typing import Any, TypeVar

import keras

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

# Packages whose callbacks write the results of a trial, or end it.
_TUNERS = frozenset({"keras_tuner", "optuna", "optuna_integration"})

# The attributes that hold the path or address to which they write.
_PATH_ATTRIBUTES = (
    "filepath",
    "filename",
    "log_dir",
    "backup_dir",
    "directory",
    "root",
)


def first_rank_only(callback: Marked) -> Marked:
    """Mark a callback of yours, so that it runs on the first rank only.

    Use it for a callback that writes a file, sends a message or prints. Those of Keras
    that write, those of MLflow, Weights & Biases, Comet, Neptune and ClearML, and those
    that inherit from them, run on the first rank without a mark; all other callbacks
    run on all ranks. A marked callback takes part in no collective: `model.evaluate` in
    it evaluates the given rows on this rank alone, and a change that it makes to the
    model or the logs does not reach the other ranks.

    Args:
        callback: A `keras.callbacks.Callback`, or a class of them.

    Returns:
        The same object.

    >>> class Diary(keras.callbacks.Callback):
    ...     def on_epoch_end(self, epoch, logs=None):
    ...         print(epoch, logs)
    >>> runs_on_first_rank_only(first_rank_only(Diary()))
    True
    """
    callback._keras_dist_first_rank_only = True  # type: ignore[attr-defined]
    return callback


def is_writer(callback: Any) -> bool:
    """Whether it writes, and is of Keras, an experiment tracker or a tuner."""
    is_keras = isinstance(callback, _WRITING_CALLBACKS)
    return is_keras or _package_of(callback, _TRACKERS | _TUNERS) is not None


def is_tracker(callback: Any) -> bool:
    """Whether its class, or one that this inherits from, is of a tracker."""
    return _package_of(callback, _TRACKERS) is not None


def _package_of(callback: Any, packages: frozenset[str]) -> str | None:
    """That of `packages` in which its class is, or one that this inherits from."""
    bases = type(callback).__mro__
    names = (base.__module__.partition(".")[0] for base in bases)
    return next(filter(packages.__contains__, names), None)


def runs_on_first_rank_only(callback: Any) -> bool:
    """Whether `callback` writes, or was marked with `first_rank_only`."""
    is_marked = getattr(callback, "_keras_dist_first_rank_only", False)
    return is_writer(callback) or bool(is_marked)


def destinations(
    callbacks: Sequence[keras.callbacks.Callback],
) -> tuple[tuple[str, str], ...]:
    """Class name and path, as the user gave it, of each that `is_writer`.

    One that has no path, of a tracker, has the name of its package instead.

    >>> destinations([keras.callbacks.CSVLogger("log.csv")])
    (('CSVLogger', 'log.csv'),)
    """
    return tuple(
        (type(callback).__name__, _destination(callback))
        for callback in callbacks
        if is_writer(callback)
    )


def _destination(callback: keras.callbacks.Callback) -> str:
    for attribute in _PATH_ATTRIBUTES:
        if isinstance(found := getattr(callback, attribute, None), str):
            return found
    return _package_of(callback, _TRACKERS | _TUNERS) or "the terminal"
