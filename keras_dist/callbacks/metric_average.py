"""Metrics of all ranks instead of this rank's own."""

from typing import Any

import keras

from keras_dist import comm, step


class MetricAverage(keras.callbacks.Callback):
    """Makes the metrics of each epoch those of all ranks, exactly.

    The state of Keras's metrics is summed over the ranks and then read, for training
    and validation: the result is that of one process on all rows, also for metrics
    that are no means, such as AUC. Values that a custom `train_step` returns without a
    metric behind them are averaged over the ranks.

    Stands before callbacks that read `logs`.

    Raises:
        ValueError: On all ranks, if they do not log the same names.
    """

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        step.install(model).averages_metrics = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        step.uninstall(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        step.session_of(self.model).steps_done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # A rank that ran out of data must find out before it sums with the others.
        step.session_of(self.model).steps_done = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if comm.size() == 1 or logs is None:
            return
        others = {name: float(logs[name]) for name in self._inexact(logs)}
        comm.agree(
            {"the names in the logs": sorted(others)},
            advice="Log the same names on every rank.",
        )
        if others:
            logs.update(comm.average(others))

    def _inexact(self, logs: dict[str, Any]) -> list[str]:
        """Names in `logs` that were not read from summed states.

        Keras takes metrics where their names are those that the last step returned,
        and otherwise what that step returned.
        """
        exact = step.session_of(self.model).exact_names
        names: list[str] = []
        for is_validation in (False, True):
            here = {n for n in logs if n.startswith("val_") == is_validation}
            names += [] if here == exact.get(is_validation, set()) else sorted(here)
        return [name for name in names if _is_number(logs[name])]


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
