"""Give all ranks the same moving statistics."""

from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, step


class AverageStatistics(keras.callbacks.Callback):
    """Averages weights that no gradient changes, such as moving statistics.

    `BatchNormalization` keeps a moving mean and variance of the rows that it has seen,
    on each rank its own. They are averaged by the rows of each rank, before each
    evaluation and at the end of each epoch, so that every rank evaluates, and the first
    rank saves, the same model.
    Weights that are equal on all ranks (of frozen layers) keep their bits.

    Stands before callbacks that save or evaluate.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_changed = False

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        step.install(model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._has_changed = True

    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()

    def on_train_end(self, logs: Any = None) -> None:
        step.uninstall(self.model)

    def _average(self) -> None:
        if comm.size() == 1 or not self._has_changed:
            return
        self._has_changed = False
        variables = [
            variable
            for variable in self.model.non_trainable_weights
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        # In float64 the weighted mean of equal float32 values is exact.
        rows = tf.cast(step.session_of(self.model).rows, tf.float64)
        weighted = [
            tf.cast(keras.ops.convert_to_tensor(variable), tf.float64) * rows
            for variable in variables
        ]
        *sums, total = comm.sum_tensors(
            [*weighted, rows], name="keras_dist.statistics", dtype=tf.float64
        )
        for variable, summed in zip(variables, sums, strict=True):
            variable.assign(keras.ops.cast(summed / total, variable.dtype))
