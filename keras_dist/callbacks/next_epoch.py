"""Tell data that is dealt which epoch it is."""

from typing import Any

import keras


class NextEpoch(keras.callbacks.Callback):
    """Writes the number of each epoch into a variable, before its data is read.

    Args:
        variable: A `tf.Variable` of a whole number.
    """

    def __init__(self, variable: Any) -> None:
        super().__init__()
        self.variable = variable

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.variable.assign(epoch)
