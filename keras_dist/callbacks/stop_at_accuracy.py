"""Stop at an accuracy."""

from typing import Any

import keras

from keras_dist import comm
from keras_dist.data.division import check_count
from keras_dist.lines import say, warn


class StopAtAccuracy(keras.callbacks.Callback):
    """Stops all ranks after the same epoch when a metric has reached its target.

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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._reached = 0
        self._was_seen = False
        self._line = ""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._has_evaluated = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._has_evaluated = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        is_due = self._has_evaluated or not self.monitor.startswith("val_")
        # All ranks decide on the same value, and all raise if one rank has none.
        values: list[Any] = comm.gather(
            float(logs[self.monitor]) if self.monitor in logs else None
        )
        if None in values:
            if is_due:
                raise ValueError(
                    f"The metric {self.monitor!r} that StopAtAccuracy monitors is not "
                    f"in the logs of rank {values.index(None)}. Received: logs with "
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

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if not self._was_seen and logs and comm.rank() == 0:
            warn(
                f"StopAtAccuracy has not seen {self.monitor!r}, because no evaluation "
                f"was made. Received: logs with {sorted(logs)}. Pass `validation_data` "
                "and a `validation_freq` of at most the number of epochs."
            )
        # Not before the progress bar has ended its line.
        if self._line and comm.rank() == 0 and self.params.get("verbose"):
            say(self._line)
