"""A backup's weights and its epoch are of the same moment."""

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.callbacks.first_rank_callbacks import first_rank_only
from keras_dist.training import atomic_save, step
from keras_dist.training.session import session_of

# As `keras.callbacks.BackupAndRestore` calls them.
_WEIGHTS = "latest.weights.h5"
_METADATA = "training_metadata.json"


@first_rank_only
class BackupEpoch(keras.callbacks.Callback):
    """Makes the epoch that `BackupAndRestore` finds the one of the weights it finds.

    It writes weights and then a small file with the epoch: a process that is killed
    between the two, or in the second, leaves files that do not fit. The weights, which
    are replaced as a whole, have the epoch inside: from there the small file is made
    again before it is read.

    Stands before the callbacks of the user.

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
    with contextlib.suppress(OSError):  # weights that Keras is going to refuse
        stamp = atomic_save.stamp_of(os.path.join(folder, _WEIGHTS))
        path = os.path.join(folder, _METADATA)
        if stamp is not None and stamp != _metadata(path):
            atomic_save.replace(path, lambda part: _write(part, json.dumps(stamp)))


def _metadata(path: str) -> Any:
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):  # missing, or half-written
        return None


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
