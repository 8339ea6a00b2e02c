"""Seconds since the training began."""

import time
from typing import Any

import keras

from keras_dist import comm


class TrainingTime(keras.callbacks.Callback):
    """Counts the seconds since the training began, including validation.

    After each epoch they are in `logs["training_seconds"]` and in the attribute
    `seconds`. At the end the first rank prints them, unless `fit` was called with
    `verbose=0`. All ranks use the clock of the first rank.

    Position in the list: before callbacks that read `logs`.

    Example:

    ```python
    clock = keras_dist.TrainingTime()
    history = keras_dist.dist_fit(model, x, y, epochs=5, callbacks=[clock])
    clock.seconds, history.history["training_seconds"]
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._begin = 0.0
        self._epochs = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._begin = time.perf_counter()
        self._epochs = 0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epochs += 1
        self._read()
        if logs is not None:
            logs["training_seconds"] = self.seconds

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._read()
        if comm.rank() == 0 and self.params.get("verbose"):
            epochs = f"{self._epochs} epoch{'' if self._epochs == 1 else 's'}"
            print(f"trained {epochs} in {self.seconds:.1f} s", flush=True)

    def state_dict(self) -> dict[str, Any]:
        """Seconds and epochs so far, for a checkpoint."""
        return {"seconds": self._seconds_now(), "epochs": self._epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; called after the training has begun."""
        self._begin -= state["seconds"]
        self._epochs = state["epochs"]

    def _seconds_now(self) -> float:
        return time.perf_counter() - self._begin

    def _read(self) -> None:
        self.seconds = comm.broadcast(self._seconds_now())
