"""Stop at an accuracy."""

from collections.abc import Sequence

from keras_dist import comm
from keras_dist.callbacks.fit_hooks import FitCallback, FitHooks, Logs
from keras_dist.errors import check_count
from keras_dist.lines import say, warn


class StopAtAccuracy(FitCallback):
    """Switches on a stop of all ranks after an epoch in which a metric is good enough.

    Args:
        target: The value of the metric to reach, for example 0.95.
        patience: Number of consecutive epochs at or above `target` before training
            stops.
        monitor: Name of the metric in the logs. For a validation metric, an epoch
            without an evaluation does not count.

    Raises:
        ValueError: If `patience` is not an integer of at least 1; or, on all ranks, if
            `monitor` is not in the logs. If no evaluation was made, it only warns.

    Example:

    ```python
    stop = keras_dist.StopAtAccuracy(0.95, patience=2)
    keras_dist.dist_fit(model, x, y, validation_data=(x_val, y_val), callbacks=[stop])
    ```
    """

    def __init__(
        self, target: float, patience: int = 1, monitor: str = "val_accuracy"
    ) -> None:
        super().__init__()
        self.target = target
        self.patience = check_count("patience", patience)
        self.monitor = monitor

    def switch_on(self, hooks: FitHooks) -> None:
        hooks.targets.append(self)

    def begin(self) -> None:
        """Begin a training."""
        self._reached = 0
        self._was_seen = False
        self._line = ""

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.has_evaluated = False

    def read(self, logs: Logs) -> float | None:
        """Return the value of this rank; `None` if it has none."""
        return float(logs[self.monitor]) if self.monitor in logs else None

    def end_epoch(self, epoch: int, found: Sequence[float | None], logs: Logs) -> None:
        """Decide on what `read` has returned on each rank, on all ranks alike."""
        is_due = self.has_evaluated or not self.monitor.startswith("val_")
        values = [value for value in found if value is not None]
        if len(values) < len(found):
            if is_due:
                raise ValueError(
                    f"The metric {self.monitor!r} that StopAtAccuracy monitors is not "
                    f"in the logs of rank {found.index(None)}. Received: logs with "
                    f"{sorted(logs)}. Pass one of these as `monitor`, add the metric "
                    "to `compile`, or pass `validation_data`."
                )
            return
        self._was_seen = True
        value = sum(values) / len(values)
        self._reached = self._reached + 1 if value >= self.target else 0
        if self._reached >= self.patience:
            self.model.stop_training = True
            self._line = (
                f"stopped after epoch {epoch + 1}: {self.monitor} {value:.4f} has "
                f"reached {self.target}"
            )

    def end(self, logs: Logs | None) -> None:
        """Say why the training was stopped, or that it could not be."""
        if not self._was_seen and logs and comm.rank() == 0:
            warn(
                f"StopAtAccuracy has not seen {self.monitor!r}, because no evaluation "
                f"was made. Received: logs with {sorted(logs)}. Pass `validation_data` "
                "and a `validation_freq` of at most the number of epochs."
            )
        # Not before the progress bar has ended its line.
        if self._line and comm.rank() == 0 and self.params.get("verbose"):
            say(self._line)
