"""Metrics that are no means, such as AUC: their results over the rows of all ranks.

The mean of the ranks' AUCs is not the AUC. But their states can be added.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.training.metrics.sync import merges, rule_of, stateful_metrics

State = list[np.ndarray]

_OF_VALIDATION = "val_"


class States:
    """States of a model's metrics that are no means, of training and of validation."""

    def __init__(self) -> None:
        self._of_training: dict[int, State] = {}

    def keep_training(self, model: Any) -> None:
        """Copy the states before a validation resets them."""
        self._of_training = {id(m): _state(m) for m in _no_means(model)}

    def of_logs(self, model: Any, logs: Mapping[str, Any]) -> dict[str, State]:
        """States by the names in the logs whose values they give.

        A value that a metric does not give now, since it was used otherwise in between,
        is not among them.
        """
        of_training, self._of_training = self._of_training, {}
        is_validated = any(name.startswith(_OF_VALIDATION) for name in logs)
        found = {}
        for name, metric in metrics_of(model, logs).items():
            is_old = is_validated and not name.startswith(_OF_VALIDATION)
            state = of_training.get(id(metric)) if is_old else _state(metric)
            if state is not None and np.allclose(result(metric, state), logs[name]):
                found[name] = state
        return found


def metrics_of(model: Any, logs: Mapping[str, Any]) -> dict[str, Any]:
    """Find the metrics that are no means, by their names in the logs.

    Keras writes the name of the output before that of a metric, if there are several.
    """
    metrics = _no_means(model)
    found = {}
    for name in logs:
        plain = name.removeprefix(_OF_VALIDATION)
        named = [m for m in metrics if f"_{plain}".endswith(f"_{m.name}")]
        if len(named) == 1:
            found[name] = named[0]
    number = {id(m): 0 for m in metrics}
    for name, metric in found.items():
        number[id(metric)] += not name.startswith(_OF_VALIDATION)
    return {name: m for name, m in found.items() if number[id(m)] == 1}


def result(metric: Any, state: Sequence[np.ndarray]) -> Any:
    """Return the result that a metric has with another state."""
    own = _state(metric)
    try:
        _assign(metric, state)
        return keras.ops.convert_to_numpy(metric.result())
    finally:
        _assign(metric, own)


def _no_means(model: Any) -> list[Any]:
    """Find the metrics whose states can be added, and which are no means."""
    return [
        metric
        for metric in stateful_metrics(getattr(model, "metrics", ()))
        if metric.variables
        and not _is_mean(metric)
        and not merges(metric)
        and all(rule_of(variable) == "sum" for variable in metric.variables)
    ]


def _is_mean(metric: Any) -> bool:
    # Not the root of one, as `RootMeanSquaredError` is.
    mean = keras.metrics.Mean
    return isinstance(metric, mean) and type(metric).result is mean.result


def _state(metric: Any) -> State:
    return [np.array(keras.ops.convert_to_numpy(v)) for v in metric.variables]


def _assign(metric: Any, state: Sequence[np.ndarray]) -> None:
    for variable, value in zip(metric.variables, state, strict=True):
        variable.assign(keras.ops.cast(value, variable.dtype))
