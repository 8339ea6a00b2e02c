"""Make the weights and the epoch of a backup fit each other."""

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.callbacks.user_callbacks import first_rank_only
from keras_dist.training import step
from keras_dist.training.saving import atomic
from keras_dist.training.session import session_of

# File names of `keras.callbacks.BackupAndRestore`.
_WEIGHTS = "latest.weights.h5"
_METADATA = "training_metadata.json"


@first_rank_only
class BackupEpoch(keras.callbacks.Callback):
    """Makes `BackupAndRestore` restore the epoch that belongs to its weights.

    `BackupAndRestore` writes the weights and then a metadata file with the epoch. A
    process that is killed between the two, or while it writes the second, leaves an
    epoch that does not belong to the weights. The file of weights, which is replaced
    atomically, contains the epoch, too: the metadata file is rewritten from it before
    `BackupAndRestore` reads it.

    Position in the list: before the user's callbacks.

    Args:
        backups: The `BackupAndRestore` callbacks of the list.
    """

    def __init__(self, backups: Sequence[Any]) -> None:
        super().__init__()
        self.backups = backups
        self._epoch = 0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        step.install(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        for backup in self.backups:
            folder = str(backup.backup_dir)
            if os.path.isfile(os.path.join(folder, _WEIGHTS)):
                _restore_metadata(folder)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        session_of(self.model).stamp.set(epoch, 0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        session_of(self.model).stamp.set(self._epoch, batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).stamp.set(epoch + 1, 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).stamp.clear()


def _restore_metadata(folder: str) -> None:
    with contextlib.suppress(OSError):  # damaged weights: Keras raises the error
        stamp = atomic.stamp_of(os.path.join(folder, _WEIGHTS))
        path = os.path.join(folder, _METADATA)
        if stamp is not None and stamp != _metadata(path):
            atomic.replace(path, lambda part: _write(part, json.dumps(stamp)))


def _metadata(path: str) -> Any:
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):  # missing, or not written to its end
        return None


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
