"""What N ranks do not add up: metrics, layers' state and variables outside the model.

A step was run on a batch and on two parts of it (`trial`), which stand for ranks.
Metrics and weights that no gradient changes are combined here over the parts as over
ranks, and compared with the values of the whole batch.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.training import metric_state
from keras_dist.training.metric_state import combine, rule_of
from keras_dist.training.metrics import stateful_metrics

# Values of weights after a run, by the variable's id, and states of metrics, by theirs.
# A tensor and a variable that keeps its value share their memory.
State = Mapping[int, Any]

# Equal but for the rounding of float32.
_TOLERANCE = 2e-3

_ADVICE = {
    "metric": "Metrics whose state does not add up over the ranks: {}. Sum over rows "
    "in `update_state` and divide in `result`, or define `merge_states(states)`.",
    "weight": "Weights that layers change, which are averaged over the ranks, weighted "
    'by rows: {}. Set their `aggregation` ("sum" for counts and sums), or let them '
    "depend on means over rows alone.",
    "error": "{}",
    "log": "Numbers that the step returns, which are averaged over the ranks: {}. "
    "Return means or sums over rows, or compute them in a metric.",
    "variable": "Variables that the model does not keep, so that each rank has its own "
    "value: {}. Make them weights of the model: `add_weight(…, trainable=False)`.",
}


@dataclass(frozen=True)
class StateDifference:
    """Something whose value on N ranks is not that of one process.

    Args:
        kind: `"metric"`, `"weight"` (that no gradient changes), `"variable"` (outside
            of the model), `"log"` (that a step returns), or `"error"`: a metric that
            cannot be combined.
        name: Its name; the text of an error.
        values: The value after the whole batch, and the one combined from its parts;
            `None` if there is none.
    """

    kind: str
    name: str
    values: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.values is None:
            return self.name
        one, combined = self.values
        return f"{self.name} ({one:.4g} from the batch, {combined:.4g} from its parts)"


def read_state(model: Any) -> State:
    """Return the states of metrics, and weights that no gradient changes."""
    metrics = {
        id(m): metric_state.read_state(m) for m in stateful_metrics(model.metrics)
    }
    return metrics | {id(v): tf.identity(v) for v in model.non_trainable_weights}


def differs(variable: Any, value: tf.Tensor) -> bool:
    """Return True if a variable has another value now, or another shape."""
    return not np.array_equal(tf.identity(variable), value)


def list_untracked_state(model: Any, variables: Sequence[Any]) -> list[StateDifference]:
    """Return the variables that a step has changed and the model does not keep."""
    names = {
        id(value): f"{layer.name}.{name}"
        for layer in private.layers_of(model)
        for name, value in vars(layer).items()
        if isinstance(value, tf.Variable)
    }
    named = (names.get(id(variable), variable.name) for variable in variables)
    return [StateDifference("variable", name) for name in named]


def describe(differences: Sequence[StateDifference]) -> list[str]:
    """Say what differs, and what to do about it."""
    sentences = []
    for kind, advice in _ADVICE.items():
        found = [str(each) for each in differences if each.kind == kind]
        if found:
            sentences.append(advice.format(", ".join(found)))
    return sentences


def compare_metrics(
    model: Any, whole: State, parts: Sequence[State], fractions: Sequence[float]
) -> list[StateDifference]:
    """Return the metrics whose states after parts of a batch do not add up.

    The metrics of the model have the states from before the runs.
    """
    differences = []
    for metric in stateful_metrics(model.metrics):
        start = metric_state.read_state(metric)
        states = [part[id(metric)].leave_out(start) for part in parts]
        expected = _result(metric, whole[id(metric)])
        with metric_state.preserve_metrics([metric]):
            try:
                starts = [start] * len(parts)
                metric_state.combine_states(metric, states, fractions, starts)
            except ValueError as error:
                differences.append(StateDifference("error", str(error)))
                continue
            found = _result(metric)
        numbers = _largest_difference(expected, found)
        if numbers is not None:
            differences.append(StateDifference("metric", metric.name, numbers))
    return differences


def compare_weights(
    model: Any, whole: State, parts: Sequence[State], fractions: Sequence[float]
) -> list[StateDifference]:
    """Return the weights without a gradient that the parts' averages do not equal."""
    differences = []
    for variable in model.non_trainable_weights:
        states = [state[id(variable)] for state in (whole, *parts)]
        if not any(differs(variable, state) for state in states):
            continue
        before = comm.to_array(variable)
        after = [state.numpy() for state in states]
        if before.dtype.kind not in "fiu":
            continue
        rule = rule_of(variable)
        if rule == "mean" and before.dtype.kind != "f":
            rule = "first"  # a counter of steps
        combined = combine(rule, after[1:], fractions, before)
        values = _largest_difference(after[0], combined)
        if values is not None:
            differences.append(StateDifference("weight", variable.path, values))
    return differences


def name_logs(
    model: Any, whole: State, numbers: Mapping[Any, tuple[float, float]]
) -> list[StateDifference]:
    """Return some numbers by their path in a step's logs, but for results of metrics.

    Each number is the one of the whole batch, and the one combined from its parts.
    """
    metrics = stateful_metrics(model.metrics) if numbers else ()
    results = [_result(metric, whole[id(metric)]) for metric in metrics]
    known = np.concatenate([[], *(found for found in results if found is not None)])
    return [
        StateDifference("log", "/".join(map(str, path)), values)
        for path, values in numbers.items()
        if not np.isclose(known, values[0], rtol=_TOLERANCE, atol=0).any()
    ]


def _result(metric: Any, state: Any = None) -> np.ndarray | None:
    """Return the numbers that a metric gives, in a state; `None` if it gives none."""
    with (
        contextlib.suppress(Exception),  # as one that has seen no row may raise
        metric_state.preserve_metrics([metric]),
    ):
        if state is not None:
            metric_state.set_state(metric, state)
        leaves = keras.tree.flatten(metric.result())
        arrays = [np.ravel(comm.to_array(leaf)) for leaf in leaves]
        return np.concatenate(arrays).astype("float64")
    return None


def _largest_difference(expected: Any, found: Any) -> tuple[float, float] | None:
    """Return the two numbers that differ most; `None` if none differ."""
    if expected is None or found is None or np.shape(expected) != np.shape(found):
        return None
    one, other = (np.ravel(np.asarray(v, np.float64)) for v in (expected, found))
    is_known = np.isfinite(one)
    if not is_known.any():
        return None
    one, other = one[is_known], other[is_known]
    gaps = np.where(np.isfinite(other), np.abs(one - other), np.inf)
    worst = int(np.argmax(gaps))
    scale = max(np.abs(one).max(), np.abs(other[np.isfinite(other)]).max(initial=0))
    if gaps[worst] <= _TOLERANCE * scale:
        return None
    return float(one[worst]), float(other[worst])
