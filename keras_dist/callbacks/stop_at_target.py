"""Stop at the target of a study, whose metric is found in the logs."""

from typing import Any

import keras

from keras_dist.report.training import accuracy_in, plain_logs, reached


class StopAtTarget(keras.callbacks.Callback):
    """Stops all ranks after the epoch in which a metric has reached its target.

    All ranks have the same logs, so all decide the same, and `StopTogether` agrees.

    Args:
        target: The value to reach.
        metric: Its name in the logs; `None` for the accuracy, by whatever name.
        has_validation: Whether there is validation data: an epoch without an
            evaluation does not count then.

    Raises:
        ValueError: On all ranks, if the logs of an epoch have no such metric.
    """

    def __init__(
        self, target: float, metric: str | None = None, *, has_validation: bool = True
    ) -> None:
        super().__init__()
        self.target = target
        self.metric = metric
        self.has_validation = has_validation
        self._has_evaluated = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._has_evaluated = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._has_evaluated = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        found = plain_logs(logs)
        if self.has_validation and not self._has_evaluated:
            return
        name = self.metric or accuracy_in(found)
        if name not in found:
            raise ValueError(
                "`keras-dist scale` was given a target for a metric that is not in the "
                f"logs. Received: the target {self.target:g} for "
                f"{self.metric or 'the accuracy'}, and logs with {sorted(found)}. Add "
                "the metric to `compile`, or name one of these by `--metric`."
            )
        if reached([{"logs": found}], name, self.target):
            self.model.stop_training = True
