"""Callbacks of Keras that write: they run on the first rank only."""

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


def destination(callback: keras.callbacks.Callback) -> str:
    """Where a callback that writes does so, as the user gave it.

    >>> destination(keras.callbacks.CSVLogger("log.csv"))
    'log.csv'
    """
    for place in _PLACES:
        if isinstance(found := getattr(callback, place, None), str):
            return found
    return "the terminal"
