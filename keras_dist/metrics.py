"""Sum metric state over the ranks, then take `result()`: exact metrics."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm


def global_result(
    metrics: Sequence[Any], result: Callable[[], Any], *, has_rows: bool = True
) -> Any:
    """`result()` as it would be had one process seen the rows of all ranks.

    The state of nearly all metrics adds up (sums, counts, confusion matrices), their
    results do not: the mean of two ranks' AUC is not the AUC. One collective, in
    float64, for all metrics together; afterwards the metrics hold this rank's own
    state again.

    Args:
        metrics: `keras.metrics.Metric` objects, the same ones on every rank.
        result: Reads the metrics, for example `Model.get_metrics_result`.
        has_rows: `False` where this rank's state must not count.
    """
    if comm.size() == 1:
        return result()
    variables = list(
        {id(v): v for metric in metrics for v in metric.variables}.values()
    )
    own = [keras.ops.convert_to_numpy(variable) for variable in variables]
    states = [np.asarray(state, np.float64) for state in own]
    everyone = comm.sum_tensors(
        [tf.constant(state if has_rows else np.zeros_like(state)) for state in states],
        name="keras_dist.metrics",
        dtype=tf.float64,
    )
    try:
        for variable, summed in zip(variables, everyone, strict=True):
            variable.assign(keras.ops.cast(_reduced(variable, summed), variable.dtype))
        # Copies: a result may be the variable itself, which gets its own state back.
        return {name: _host(value) for name, value in result().items()}
    finally:
        for variable, state in zip(variables, own, strict=True):
            variable.assign(state)


def _reduced(variable: Any, summed: Any) -> Any:
    """A state's own way to add up: Keras's metrics all declare "sum"."""
    is_mean = getattr(variable, "aggregation", "sum") == "mean"
    return summed / comm.size() if is_mean else summed


def _host(value: Any) -> Any:
    array = np.array(keras.ops.convert_to_numpy(value))
    return float(array) if array.ndim == 0 else array
