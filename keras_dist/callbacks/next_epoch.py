"""Pass the number of the epoch to the sharded data and to the train step."""

from typing import Any

import keras

from keras_dist.training.session import session_of


class NextEpoch(keras.callbacks.Callback):
    """Assigns the epoch, and its first step, to variables before its data is read.

    Args:
        variable: A `tf.Variable` for the number of the epoch.
        steps: Steps of an epoch; `None` if unknown.
    """

    def __init__(self, variable: Any, steps: int | None) -> None:
        super().__init__()
        self.variable = variable
        self.steps = steps

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.variable.assign(epoch)
        session_of(self.model).training_data.begin_epoch(epoch, self.steps)
