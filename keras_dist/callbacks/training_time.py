"""How long the training has taken."""

import time
from typing import Any

import keras

from keras_dist import comm


class TrainingTime(keras.callbacks.Callback):
    """Counts the seconds since the training began, validation included.

    `logs["training_seconds"]` holds them after each epoch, the attribute `seconds` at
    any time after an epoch, and the first rank prints them at the end, unless `fit`
    was called with `verbose=0`. The clock is the first rank's, on all ranks.

    Stands before callbacks that read `logs`.
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
        """The seconds so far, where another process goes on with the training."""
        return {"seconds": self._seconds_now(), "epochs": self._epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; after the training has begun."""
        self._begin -= state["seconds"]
        self._epochs = state["epochs"]

    def _seconds_now(self) -> float:
        return time.perf_counter() - self._begin

    def _read(self) -> None:
        self.seconds = comm.broadcast(self._seconds_now())
