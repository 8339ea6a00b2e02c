"""How fast all ranks train together."""

import time
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.callbacks.breakdown import Times, breakdown
from keras_dist.optimizer import Stopwatch
from keras_dist.training import step
from keras_dist.training.session import session_of


class Throughput(keras.callbacks.Callback):
    """Puts rows per second over all ranks into the logs of each epoch.

    `logs["rows_per_second"]` is the number of rows that all ranks trained on, over
    the seconds of the slowest rank; validation does not count. On the first rank one
    line an epoch says so, unless `fit` was called with `verbose=0`.

    Stands before callbacks that read `logs`.

    Args:
        breakdown: Whether to say where the time goes, too: in the line, and as
            `logs["computing"]`, `["averaging"]`, `["waiting"]` (for the rank that came
            last) and `["input"]`, shares of the time of all ranks that add up to 1.
            Of an epoch of more than 262,144 steps, the first so many. The first epoch
            counts tracing as computing. On a GPU, whose work is queued, the shares may
            be those of the queue: there `timeline` tells more.
    """

    def __init__(self, breakdown: bool = False) -> None:
        super().__init__()
        self.breakdown = breakdown
        self._begins: list[float] = []
        self._begin = 0.0
        self._measured: tuple[int, float] | None = None
        self._line = ""

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        session = step.install(model)
        if self.breakdown:
            session.instruments.time_steps()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._print()
        session_of(self.model).rows_trained.begin_epoch()
        self._measured = None
        if self.breakdown:
            self._stopwatch().reset()
            self._begins.clear()
        self._begin = time.perf_counter()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if self.breakdown:
            self._begins.append(time.time())

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._measure()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        times = self._times() if self.breakdown else None
        measured, everyone = zip(*comm.gather((self._measure(), times)), strict=True)
        rows = sum(rows for rows, _ in measured)
        rate = rows / max(seconds for _, seconds in measured)
        if logs is not None:
            logs["rows_per_second"] = rate
        ranks = f"{len(measured)} rank{'s' if len(measured) > 1 else ''}"
        self._line = f"epoch {epoch + 1}: {rate:,.0f} rows/s on {ranks}"
        if None not in everyone:
            pieces = breakdown(everyone)
            self._line += f"; {pieces}"
            if logs is not None:
                for name in ("computing", "averaging", "waiting", "input"):
                    logs[name] = getattr(pieces, name)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._print()
        step.uninstall(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: another process has a clock of its own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""

    def _measure(self) -> tuple[int, float]:
        if self._measured is None:
            # Reading the count waits for the last step.
            rows = session_of(self.model).rows_trained.of_this_process()
            self._measured = rows, time.perf_counter() - self._begin
        return self._measured

    def _times(self) -> Times:
        stopwatch = self._stopwatch()
        arrivals, exchanges = stopwatch.read()
        # Several steps of one execution have one beginning; those after it wait for
        # input inside of it, which counts as computing.
        stride = max(1, -(-len(arrivals) // max(1, len(self._begins))))
        begins = np.array(self._begins)[: len(arrivals[::stride])]
        waits = np.maximum(0.0, arrivals[::stride][: len(begins)] - begins)
        if stopwatch.has_traced:  # that was not the input
            waits[:1] = 0.0
        return Times(self._measure()[1], float(waits.sum()), exchanges)

    def _stopwatch(self) -> Stopwatch:
        stopwatch = session_of(self.model).instruments.stopwatch
        assert stopwatch is not None  # set by `set_model`
        return stopwatch

    def _print(self) -> None:
        # Later than the end of the epoch, when the progress bar has ended its line.
        if self._line and comm.rank() == 0 and self.params.get("verbose"):
            print(self._line, flush=True)
        self._line = ""
