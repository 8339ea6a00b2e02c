"""How fast all ranks train together."""

import time
from typing import Any

import keras

from keras_dist import comm, step


class Throughput(keras.callbacks.Callback):
    """Puts rows per second over all ranks into the logs of each epoch.

    `logs["rows_per_second"]` is the number of rows that all ranks trained on, over
    the seconds of the slowest rank; validation does not count. On the first rank one
    line an epoch says so, unless `fit` was called with `verbose=0`.

    Stands before callbacks that read `logs`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin = 0.0
        self._measured: tuple[int, float] | None = None
        self._line = ""

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        step.install(model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._print()
        step.session_of(self.model).rows.assign(0)
        self._measured = None
        self._begin = time.perf_counter()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._measure()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        measured = comm.gather(self._measure())
        rows = sum(rows for rows, _ in measured)
        rate = rows / max(seconds for _, seconds in measured)
        if logs is not None:
            logs["rows_per_second"] = rate
        ranks = f"{len(measured)} rank{'s' if len(measured) > 1 else ''}"
        self._line = f"epoch {epoch + 1}: {rate:,.0f} rows/s on {ranks}"

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._print()
        step.uninstall(self.model)

    def _measure(self) -> tuple[int, float]:
        if self._measured is None:
            # Reading the count waits for the last step.
            rows = int(step.session_of(self.model).rows.numpy())
            self._measured = rows, time.perf_counter() - self._begin
        return self._measured

    def _print(self) -> None:
        # Later than the end of the epoch, when the progress bar has ended its line.
        if self._line and comm.rank() == 0 and self.params.get("verbose"):
            print(self._line, flush=True)
        self._line = ""
