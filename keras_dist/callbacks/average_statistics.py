"""Synchronize the state that no gradient changes."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm
from keras_dist.callbacks.fit_hooks import FitCallback, FitHooks, Logs
from keras_dist.optimizer.accumulation import move_to_first_rank, pending_sums
from keras_dist.training.metrics import combine, rule_of
from keras_dist.training.same_values import read_checksums
from keras_dist.training.session import session_of


class AverageStatistics(FitCallback):
    """Switches on the synchronization of statistics of each rank's own rows.

    This happens before each evaluation and prediction, and at the end of each
    epoch, so that all ranks evaluate the same model, and the first rank saves it. The
    `aggregation` of each non-trainable weight, an attribute set by the author of its
    layer, decides how:

    - none or `"mean"`: floating-point values, such as the moving mean and variance of
      `BatchNormalization`, are averaged over the ranks, weighted by rows; integers,
      such as step counters, are copied from the first rank;
    - `"sum"`: the increments of all ranks since the last synchronization are added, as
      for a counter of rows;
    - `"only_first_replica"`: the value is copied from the first rank.

    Weights that are equal on all ranks, as in frozen layers, do not change at all.
    Gradients that are accumulated for a later update are summed on the first rank; at
    the end of the training, all ranks receive the sum.

    Position in the list: a callback of keras_dist before those that save or evaluate.

    Example:

    ```python
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    model.fit(x, y, callbacks=[keras_dist.AverageStatistics()])
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_changed = False
        self._before: list[Any] = []
        self._loaded: list[Any] = []

    def switch_on(self, hooks: FitHooks) -> None:
        hooks.use(statistics=self)

    def read(self) -> Any:
        """Return checksums of what may have to be averaged, for `end_epoch`."""
        if comm.size() == 1 or not self.has_changed:
            return None
        return read_checksums(variables_by_rule(self.model)["mean"])

    def end_epoch(self, by_rank: Sequence[Any], logs: Logs) -> None:
        """Synchronize, after what `read` has returned on each rank."""
        if comm.size() == 1 or not self.has_changed:
            return
        self.has_changed = False
        move_to_first_rank(pending_sums(self.model))
        by_rule = variables_by_rule(self.model)
        _average(by_rule["mean"], by_rank, session_of(self.model).rows_trained)
        if by_rule["sum"]:
            _add_up(by_rule["sum"], self._before)
        comm.broadcast_variables(by_rule["first"], 0)
        self.remember()

    def synchronize(self) -> None:
        """Synchronize now, on all ranks."""
        if comm.size() > 1 and self.has_changed:
            self.end_epoch(comm.gather(self.read()), {})

    def end(self) -> None:
        """Let all ranks hold the sums of gradients that wait for an update."""
        if session_of(self.model).has_started:  # on all ranks; else on none
            comm.broadcast_variables(pending_sums(self.model), 0)

    def remember(self) -> None:
        """Note what is added up from now on."""
        added_up = variables_by_rule(self.model)["sum"]
        self._before = self._loaded or list(map(comm.to_array, added_up))
        self._loaded = []

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        known = {"before": self._before, "size": comm.size()}
        return {"has_changed": self.has_changed, **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; called before the first step."""
        self.has_changed = state["has_changed"]
        # On another number of ranks, all begin with what was added up until then.
        size = state.get("size", comm.size())  # which older checkpoints do not have
        self._loaded = state["before"] if size == comm.size() else []


def variables_by_rule(model: Any) -> dict[str, list[Any]]:
    """Non-trainable weights by how they are synchronized."""
    found: dict[str, list[Any]] = {"mean": [], "sum": [], "first": []}
    for variable in model.non_trainable_weights:
        rule = rule_of(variable)
        is_float = keras.backend.is_float_dtype(variable.dtype)
        found["first" if rule == "mean" and not is_float else rule].append(variable)
    return found


def _average(variables: list[Any], checksums: Sequence[Any], rows: Any) -> None:
    """Average variables over the ranks; those that are equal on all are not changed."""
    pairs = zip(variables, zip(*checksums, strict=True), strict=True)
    differing = [variable for variable, by_rank in pairs if len(set(by_rank)) > 1]
    if not differing:
        return
    rows = tf.cast(rows, tf.float64)
    *sums, total = comm.sum_tensors(
        [tf.cast(v.value, tf.float64) * rows for v in differing] + [rows],
        name="keras_dist.statistics",
        dtype=tf.float64,
    )
    for variable, summed in zip(differing, sums, strict=True):
        variable.assign(tf.cast(summed / total, variable.dtype))


def _add_up(variables: list[Any], before: list[Any]) -> None:
    by_rank = comm.gather([comm.to_array(variable) for variable in variables])
    for variable, start, *values in zip(variables, before, *by_rank, strict=True):
        added = combine("sum", values, [1] * len(values), start)
        variable.assign(added.astype(variable.dtype))
