"""Pass the number of the epoch to the sharded data and to the train step."""

from typing import Any

import keras

from keras_dist.training.session import session_of


class NextEpoch(keras.callbacks.Callback):
    """Tells the data and the train step which epoch begins, before its data is read."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).training_data.begin_epoch(epoch)
