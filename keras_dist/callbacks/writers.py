"""Callbacks of Keras that write: they run on the first rank only."""

from collections.abc import Sequence

import keras

# Every rank holds the same weights and logs, and two processes that write one file
# damage it. `OrbaxCheckpoint` exists in newer versions of Keras.
_WRITERS = tuple(
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
_PLACES = ("filepath", "filename", "log_dir", "backup_dir", "directory", "root")


def is_writer(callback: keras.callbacks.Callback) -> bool:
    """Whether `callback` writes to a file, a server or the terminal."""
    return isinstance(callback, _WRITERS)


def destinations(
    callbacks: Sequence[keras.callbacks.Callback],
) -> tuple[tuple[str, str], ...]:
    """Name and place, as the user gave it, of each callback that writes.

    >>> destinations([keras.callbacks.CSVLogger("log.csv")])
    (('CSVLogger', 'log.csv'),)
    """
    return tuple(
        (type(callback).__name__, _place(callback))
        for callback in callbacks
        if is_writer(callback)
    )


def _place(callback: keras.callbacks.Callback) -> str:
    for place in _PLACES:
        if isinstance(found := getattr(callback, place, None), str):
            return found
    return "the terminal"
