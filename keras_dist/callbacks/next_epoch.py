"""Tell data that is dealt, and the step that reads it, which epoch it is."""

from typing import Any

import keras

from keras_dist.training.session import session_of


class NextEpoch(keras.callbacks.Callback):
    """Writes where each epoch begins into variables, before its data is read.

    Args:
        variable: A `tf.Variable` that gets the number of the epoch.
        steps: Steps of an epoch.
    """

    def __init__(self, variable: Any, steps: int | None) -> None:
        super().__init__()
        self.variable = variable
        self.steps = steps

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.variable.assign(epoch)
        session_of(self.model).training.begin_epoch(epoch, self.steps)
