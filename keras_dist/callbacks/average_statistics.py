"""Give all ranks the same moving statistics."""

from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm


class AverageStatistics(keras.callbacks.Callback):
    """Averages weights that no gradient changes, such as moving statistics.

    `BatchNormalization` keeps a moving mean and variance of the rows that it has seen,
    on each rank its own. They are averaged before each evaluation and at the end of
    each epoch, so that every rank evaluates, and the first rank saves, the same model.
    Weights that are equal on all ranks (of frozen layers) keep their bits.

    Stands before callbacks that save or evaluate.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_changed = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._has_changed = True

    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()

    def _average(self) -> None:
        if comm.size() == 1 or not self._has_changed:
            return
        self._has_changed = False
        variables = [
            variable
            for variable in self.model.non_trainable_weights
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        # In float64 the sum of equal float32 values, divided again, is exact.
        sums = comm.sum_tensors(
            [keras.ops.convert_to_tensor(variable) for variable in variables],
            name="keras_dist.statistics",
            dtype=tf.float64,
        )
        for variable, total in zip(variables, sums, strict=True):
            variable.assign(keras.ops.cast(total / comm.size(), variable.dtype))
