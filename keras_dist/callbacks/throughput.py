"""Rows per second of all ranks."""

import time
from collections.abc import Sequence

from keras_dist.callbacks.fit_hooks import FitCallback, FitHooks, Logs
from keras_dist.training.session import session_of


class Throughput(FitCallback):
    """Switches on the rows per second of all ranks in the logs of each epoch.

    `logs["rows_per_second"]` is the number of rows that all ranks trained on, divided
    by the training time of the slowest rank, without validation. Keras prints it with
    the other logs.

    Position in the list: a callback of keras_dist before those that read `logs`.

    Raises:
        RuntimeError: At the end of an epoch, if another rank has ended.

    Example:

    ```python
    speed = keras_dist.Throughput()
    history = keras_dist.dist_fit(model, x, y, callbacks=[speed])
    history.history["rows_per_second"]
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin = 0.0
        self._measured: tuple[int, float] | None = None

    def switch_on(self, hooks: FitHooks) -> None:
        hooks.use(throughput=self)

    def begin_epoch(self) -> None:
        """Begin to measure."""
        session_of(self.model).reset_rows_trained()
        self._measured = None
        self._begin = time.perf_counter()

    def end_epoch(self, by_rank: Sequence[tuple[int, float]], logs: Logs) -> None:
        """Log the speed, from what `read` has returned on each rank."""
        rows = sum(rows for rows, _ in by_rank)
        logs["rows_per_second"] = rows / max(seconds for _, seconds in by_rank)

    def read(self) -> tuple[int, float]:
        """Return rows and seconds of this rank's training in this epoch."""
        if self._measured is None:
            # Reading the number of rows waits for the last step to end.
            session = session_of(self.model)
            rows = session.rows_trained - session.rows_restored
            self._measured = rows, time.perf_counter() - self._begin
        return self._measured
