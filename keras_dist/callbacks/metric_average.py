"""Compute metrics over the rows of all ranks."""

from keras_dist.callbacks.fit_hooks import FitCallback, FitHooks
from keras_dist.training.session import session_of


class MetricAverage(FitCallback):
    """Switches on metrics that cover the rows of all ranks exactly.

    The state of each metric is summed over the ranks before its result is computed, in
    training and validation. So the result equals the result of one process on all rows,
    also for metrics that are not means, such as AUC.

    A metric whose state must not be summed declares another rule. Either its variables
    have an `aggregation` (`"sum"`, Keras's default; `"mean"`, weighted by rows;
    `"only_first_replica"`), or it has a method `merge_states(states)`, which receives
    the states of all ranks, each a list of arrays in the order of `variables`, and
    assigns the merged state. The result of a metric without variables is averaged,
    weighted by rows. If a custom `train_step` or `test_step` returns a value without a
    metric, the values of the last step are averaged, weighted by the rows of the last
    batch.

    An evaluation inside one of your own callbacks is not synchronized: it returns the
    metrics of the rank that runs it.

    Raises:
        ValueError: On all ranks, if their metrics, the shapes of their states, or the
            names in their logs differ.

    Example:

    ```python
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    model.fit(x, y, callbacks=[keras_dist.MetricAverage()])
    ```
    """

    def switch_on(self, hooks: FitHooks) -> None:
        session_of(hooks.model).sums_metrics = True
