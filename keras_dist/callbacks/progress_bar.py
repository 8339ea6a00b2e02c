"""Keras's progress bar, with the rows of all ranks."""

import time
from typing import Any

import keras

from keras_dist.callbacks.throughput import Throughput
from keras_dist.launch import monitor


class ProgressRecord(keras.callbacks.Callback):
    """Writes epoch and step to this rank's record, for reports of ranks that wait.

    It has no hook at the end of a batch: with one, Keras would wait for each batch.

    Position in the list: first.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("begin", epoch=0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("begin", epoch=epoch)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        monitor.here.enter("step", step=batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("test")

    def on_test_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        monitor.here.enter("test", step=batch)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("end")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("end")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        monitor.here.enter("")


# Seconds between two numbers: more often, nobody can read them.
_INTERVAL = 0.5

# Seconds after which an evaluation in a fit has a bar.
_LONG = 2.0


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's bar, with rows per second of all ranks, and one for long evaluations.

    Neither the logs nor the `History` are changed.

    Args:
        throughput: The callback of the same fit that measures.
    """

    async_safe = True  # as is Keras's own: no step waits for it

    def __init__(self, throughput: Throughput) -> None:
        super().__init__()
        self._throughput = throughput
        self._rate: dict[str, float] = {}
        self._measured = 0.0
        self._evaluation: _EvaluationBar | None = None
        self._evaluation_steps: int | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._rate = {}
        self._measured = time.monotonic()
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        now = time.monotonic()
        if now - self._measured >= _INTERVAL:
            self._measured = now
            self._rate = {"rows_per_second": self._throughput.rate_so_far()}
        super().on_train_batch_end(batch, {**(logs or {}), **self._rate})

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_test_begin(logs)
        if self.verbose == 1:
            self._evaluation = _EvaluationBar(self._evaluation_steps)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_test_batch_end(batch, logs)
        if self._evaluation is not None:
            self._evaluation.update(batch + 1)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_test_end(logs)
        if self._evaluation is not None:
            self._evaluation_steps = self._evaluation.end()


class _EvaluationBar:
    """A line of its own for one evaluation, if it takes more than 2 s.

    Args:
        steps: Steps of the evaluation before; `None` if there was none.
    """

    def __init__(self, steps: int | None) -> None:
        self._begin = time.monotonic()
        self._bar = keras.utils.Progbar(steps, interval=_INTERVAL)
        self._steps = 0
        self._is_shown = False

    def update(self, steps: int) -> None:
        """Show that so many steps are done, if it is time."""
        self._steps = steps
        if not self._is_shown and time.monotonic() - self._begin >= _LONG:
            self._is_shown = True
            print("\nevaluation", flush=True)
        if self._is_shown:
            self._bar.update(steps, finalize=False)

    def end(self) -> int:
        """End the line; returns the number of steps."""
        if self._is_shown:
            self._bar.target = self._steps
            self._bar.update(self._steps, finalize=True)
        return self._steps
