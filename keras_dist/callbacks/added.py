"""Callbacks that `dist_fit` adds where they are needed."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, optimizer
from keras_dist.training.session import session_of


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
            session_of(self.model).rates = {}
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
            logs.update(session_of(self.model).rates or {})


class NextEpoch(keras.callbacks.Callback):
    """Tells the data and the train step which epoch begins, before its data is read."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).begin_epoch(epoch)
