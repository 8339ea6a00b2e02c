"""Give all ranks the same state, also where no gradient changes it."""

from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, optimizer
from keras_dist.training import step
from keras_dist.training.session import session_of


class AverageStatistics(keras.callbacks.Callback):
    """Brings together what each rank has gathered by itself.

    Before each evaluation and at the end of each epoch, so that every rank evaluates,
    and the first rank saves, the same model. Each weight that no gradient changes
    follows one rule, by the `aggregation` that its author gave to it:

    - none or `"mean"`: numbers with a fraction, such as the moving mean and variance of
      `BatchNormalization`, are averaged by the rows of each rank; whole numbers, such
      as counters of steps, are the first rank's;
    - `"sum"`: what the ranks have added since the last time is added up, as for a
      counter of rows;
    - `"only_first_replica"`: the first rank's.

    Weights that are equal on all ranks (of frozen layers) keep their bits. Gradients
    that are accumulated for an update to come are summed.

    Stands before callbacks that save or evaluate.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_changed = False
        self._is_synchronized = False
        self._before: dict[int, Any] = {}
        self._loaded: list[Any] = []

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        step.install(model).first_step.call_last(self._remember)

    def on_train_begin(self, logs: Any = None) -> None:
        # What another fit has left is equal on all ranks.
        self._is_synchronized = comm.size() > 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._is_synchronized:
            self._is_synchronized = False
            for found in _between_updates(self.model):
                optimizer.divide(found)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._has_changed = True

    def on_test_begin(self, logs: Any = None) -> None:
        # A rank whose validation data cannot be opened is not here, and says so.
        comm.run_on_all(lambda: None)
        self._synchronize()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        session_of(self.model).metrics.end_opening()
        self._synchronize()

    def on_train_end(self, logs: Any = None) -> None:
        step.uninstall(self.model)

    def _synchronize(self) -> None:
        if comm.size() == 1 or not self._has_changed:
            return
        self._has_changed = False
        self._is_synchronized = True
        optimizer.synchronize_replicas(self.model)
        for found in _between_updates(self.model):
            optimizer.sum_accumulated(found)
        by_rule = variables_by_rule(self.model)
        _average(by_rule["mean"], session_of(self.model).rows_trained.as_tensor())
        _add_up(by_rule["sum"], self._before)
        comm.broadcast_variables(by_rule["first"], 0)
        self._remember()

    def _remember(self) -> None:
        added_up = variables_by_rule(self.model)["sum"]
        self._before = {id(v): keras.ops.convert_to_numpy(v) for v in added_up}
        known = zip(added_up, self._loaded, strict=False)
        self._before |= {id(variable): value for variable, value in known}
        self._loaded = []

    def state_dict(self) -> dict[str, Any]:
        """What a training that goes on has to know."""
        return {
            "has_changed": self._has_changed,
            "is_united": self._is_synchronized,
            "before": list(self._before.values()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; before the first step."""
        self._has_changed = state["has_changed"]
        self._is_synchronized = state["is_united"] and comm.size() > 1
        self._loaded = list(state["before"])


def variables_by_rule(model: Any) -> dict[str, list[Any]]:
    """Weights that no gradient changes and the ranks share, by their rule."""
    found: dict[str, list[Any]] = {"mean": [], "sum": [], "first": []}
    local = optimizer.local_ids(model)
    for variable in model.non_trainable_weights:
        if id(variable) in local:
            continue
        # Keras 3.5 calls everything "mean" that says nothing else.
        aggregation = getattr(variable, "aggregation", None)
        if aggregation == "sum":
            found["sum"].append(variable)
        elif aggregation == "only_first_replica":
            found["first"].append(variable)
        elif keras.backend.is_float_dtype(variable.dtype):
            found["mean"].append(variable)
        elif keras.backend.is_int_dtype(variable.dtype):
            found["first"].append(variable)
    return found


def _average(variables: list[Any], rows: Any) -> None:
    # In float64 the weighted mean of equal float32 values is exact.
    rows = tf.cast(rows, tf.float64)
    *sums, total = comm.sum_tensors(
        [tf.cast(keras.ops.convert_to_tensor(v), tf.float64) * rows for v in variables]
        + [rows],
        name="keras_dist.statistics",
        dtype=tf.float64,
    )
    for variable, summed in zip(variables, sums, strict=True):
        variable.assign(keras.ops.cast(summed / total, variable.dtype))


def _add_up(variables: list[Any], before: dict[int, Any]) -> None:
    for variable in variables:
        start = before[id(variable)]
        added = comm.sum(keras.ops.convert_to_numpy(variable) - start)
        variable.assign(start + added)


def _between_updates(model: Any) -> list[Any]:
    """Optimizers that have averaged gradients of some batches not yet used."""
    return [
        found
        for found in optimizer.optimizers_of(model)
        if optimizer.is_distributed(found)
        and not optimizer.uses_local_sgd(found)
        and optimizer.is_between_updates(found)
    ]
