"""Record the epoch and the step of this rank."""

from typing import Any

import keras

from keras_dist.launch import monitor


class ProgressRecord(keras.callbacks.Callback):
    """Writes epoch and step to this rank's record, for reports of ranks that wait.

    It has no hook at the end of a batch: with one, Keras would wait for each batch.

    Position in the list: first.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        monitor.here.enter("begin", epoch=0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        monitor.here.enter("begin", epoch=epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        monitor.here.enter("step", step=batch)

    def on_test_begin(self, logs: Any = None) -> None:
        monitor.here.enter("test")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        monitor.here.enter("test", step=batch)

    def on_test_end(self, logs: Any = None) -> None:
        monitor.here.enter("end")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        monitor.here.enter("end")

    def on_train_end(self, logs: Any = None) -> None:
        monitor.here.enter("")
