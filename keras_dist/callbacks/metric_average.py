"""Metrics of all ranks instead of this rank's own."""

from typing import Any

import keras

from keras_dist.training import step


class MetricAverage(keras.callbacks.Callback):
    """Makes the metrics of each epoch those of all ranks, exactly.

    The state of metrics is summed over the ranks and then read, for training and
    validation: the result is that of one process on all rows, also for metrics that are
    no means, such as AUC. A metric whose state does not add up says how it comes
    together: by the `aggregation` of its variables (`"sum"`, which is Keras's default;
    `"mean"`, by rows; `"only_first_replica"`), or by a method `merge_states(states)`,
    which is given the states of all ranks, each a list of arrays in the order of
    `variables`, and sets its own. The result of a metric without variables is averaged
    by rows. So is a value that a custom `train_step` or `test_step` returns without a
    metric behind it: by the rows of the last batch, since it is that of the last step.

    An evaluation that one of your own callbacks makes is this rank's alone.

    Stands before callbacks that read `logs`.

    Raises:
        ValueError: On all ranks, if they do not have the same metrics, with states of
            the same shapes, or do not log the same names.
    """

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        step.install(model).metrics.average()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        step.uninstall(self.model)
