"""Callbacks that `dist_fit` adds where they are needed."""

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, optimizer
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

    def set_model(self, model: keras.Model) -> None:
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

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
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


class EffectiveRate(keras.callbacks.Callback):
    """Puts the rate of the epoch's last update into `logs["effective_learning_rate"]`.

    The `learning_rate` that `TensorBoard` and trackers write is the rate for one
    process, because the scaling factor is applied only inside the update. With several
    optimizers in a `MultiOptimizer`, the name of each one is appended to the key, as in
    Keras.

    If no rank has a `TensorBoard` or a tracker, the logs are not changed. If a
    `TensorBoard` writes batches, their rates are written, too.

    Position in the list: before callbacks that read `logs`.

    Args:
        tensorboards: The `TensorBoard` callbacks of the list.
        has_tracker: Whether the list has a callback of an experiment tracker.
    """

    def __init__(
        self, tensorboards: Sequence[Any], *, has_tracker: bool = False
    ) -> None:
        super().__init__()
        self._is_asked = bool(tensorboards) or has_tracker
        self._is_wanted = False
        # `TensorBoard` writes on the first rank only.
        self._every = [
            tensorboard.update_freq
            for tensorboard in tensorboards
            if comm.rank() == 0 and tensorboard.update_freq != "epoch"
        ]
        self._batch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._is_wanted = any(comm.gather(self._is_asked))
        if self._is_wanted:
            session_of(self.model).rates.keep()
        self._batch = 0

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        # Not through the logs: older versions of Keras may use the logs of the last
        # batch as those of the epoch. `TensorBoard` has made its writer the default.
        self._batch += 1
        if any(self._batch % every == 0 for every in self._every):
            for name, rate in optimizer.effective_rates(self.model).items():
                tf.summary.scalar(f"batch_{name}", rate, step=self._batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_wanted and logs is not None:
            logs.update(session_of(self.model).rates.of_epoch)


class NextEpoch(keras.callbacks.Callback):
    """Tells the data and the train step which epoch begins, before its data is read."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).training_data.begin_epoch(epoch)
