"""Callbacks that `dist_fit` adds where they are needed."""

from typing import Any

import keras

from keras_dist import comm
from keras_dist.launch import monitor
from keras_dist.training.session import session_of


class EffectiveRate(keras.callbacks.Callback):
    """Puts the rate of the epoch's last update into `logs["effective_learning_rate"]`.

    The `learning_rate` that `TensorBoard` and trackers write is the rate for one
    process, because the scaling factor is applied only inside the update. With several
    optimizers in a `MultiOptimizer`, the name of each one is appended to the key, as in
    Keras. If no rank has a `TensorBoard` or a tracker, the logs are not changed.

    Position in the list: before callbacks that read `logs`.

    Args:
        is_read: Whether the list has a `TensorBoard` or a tracker.
    """

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        self._is_read = is_read

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if any(comm.gather(self._is_read)):
            session_of(self.model).rates = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(session_of(self.model).rates or {})


class NextEpoch(keras.callbacks.Callback):
    """Tells the data and the train step which epoch begins, before its data is read."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).begin_epoch(epoch)


class ProgressRecord(keras.callbacks.Callback):
    """Writes epoch and step to this rank's record, for reports of ranks that wait.

    It has no hook at the end of a batch: with one, Keras would wait for each batch.

    Position in the list: first.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("begin", epoch=0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("begin", epoch=epoch)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        monitor.here.enter("step", step=batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("test")

    def on_test_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        monitor.here.enter("test", step=batch)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("end")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("end")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("")
