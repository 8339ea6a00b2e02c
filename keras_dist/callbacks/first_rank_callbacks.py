"""Callbacks that run on the first rank only: those that write, and marked ones."""

from collections.abc import Sequence
from typing import Any, TypeVar

import keras

Marked = TypeVar("Marked")

# Every rank holds the same weights and logs, and two processes that write one file
# damage it. `OrbaxCheckpoint` exists in newer versions of Keras.
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

# The attribute in which each of them keeps the place it writes to.
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

    For one that writes a file, sends a message or prints. Other callbacks run on all
    ranks, and those of Keras that write are on the first rank anyway. What it does with
    the model concerns this rank alone: `model.evaluate` in it evaluates the rows it is
    given, and asks no other rank. What it changes, the other ranks do not see.

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
    """Whether `callback` is one of Keras's that write, to a file or elsewhere."""
    return isinstance(callback, _WRITING_CALLBACKS)


def runs_on_first_rank_only(callback: Any) -> bool:
    """Whether `callback` writes, or was marked with `first_rank_only`."""
    is_marked = getattr(callback, "_keras_dist_first_rank_only", False)
    return is_writer(callback) or bool(is_marked)


def destinations(
    callbacks: Sequence[keras.callbacks.Callback],
) -> tuple[tuple[str, str], ...]:
    """Name and place, as the user gave it, of each callback that writes.

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
    return "the terminal"
