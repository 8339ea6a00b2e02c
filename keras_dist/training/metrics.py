"""Metrics over the rows of all ranks: combine their states, then take `result()`.

The states of all metrics are gathered, and summed, averaged or copied; `result()` is
read before this rank's own state is restored.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_dist import comm, private
from keras_dist.lines import warn
from keras_dist.training.metric_state import (
    MetricState,
    combine,
    combine_states,
    is_of_keras,
    merges,
    preserve_metrics,
    read_state,
    rule_of,
)

# Names of dicts and indices of lists on the way to a value of some logs.
Path = tuple[Any, ...]

_ADVICE = "Compile and track the same metrics, and log the same names, on every rank."


@dataclass(frozen=True)
class UpdateCounts:
    """How much data the metrics of one rank have been updated with since their reset.

    Args:
        rows: Rows of data.
        steps: Batches.
        last_rows: Rows of the last batch.
        has_rows: `False` if this rank evaluated a copy of another rank's row, so that
            its state must not be counted.
        is_over: `False` if the results are those of a batch, and more may come.
    """

    rows: int = 0
    steps: int = 0
    last_rows: int = 0
    has_rows: bool = True
    is_over: bool = True


def global_result(
    metrics: Sequence[Any],
    result: Callable[[], Any],
    *,
    seen: UpdateCounts,
    starts: Mapping[int, MetricState] | None = None,
    logs: Any = None,
    sums: Collection[Path] | None = (),
) -> Any:
    """`result()` as if one process had updated the metrics with the rows of all ranks.

    The mean of two ranks' AUC is not the AUC. So the state of all metrics is gathered
    and combined, `result()` is called, and this rank's own state is restored:

    - A method `merge_states(states)` of the metric is called with the states of all
      ranks that have rows, each a list of arrays in the order of `variables`, and sets
      the metric's own state.
    - Without it, the `aggregation` of each variable decides: `"sum"`, which Keras sets
      for the variables of metrics; `"only_first_replica"`, that of the first rank with
      rows; `"mean"` or none, an average weighted by rows.
    - What a metric keeps in Python is combined, too (`metric_state`), or an error.
    - If the results still differ, those of the first rank count, with a warning.

    A rank that has evaluated all of its batches takes part in the results of batches
    until all ranks have: it may have fewer.

    Args:
        metrics: `keras.metrics.Metric` objects, the same ones on every rank.
        result: Function that reads the metrics, such as `Model.get_metrics_result`.
        seen: How much data this rank's metrics have been updated with.
        starts: The states in which metrics have begun, by the metric's id; by default,
            their variables have begun at 0.
        logs: What this rank's last step returned, or `None`. Keras logs it instead of
            `result()` if their names differ.
        sums: Paths of what a step returns as a sum over rows; `None` if no two ranks
            have rows of one batch.

    Returns:
        The values of `result()`; or, if `logs` has other names, what the last step of
        one process would have returned, in the structure of `logs`.

    Raises:
        ValueError: On all ranks, if they do not have the same metrics, with states of
            the same shapes, or do not log the same names; or if a metric keeps in
            Python what cannot be combined.
    """
    if comm.size() == 1:
        return result()
    while True:
        exact, is_over = _combine_once(metrics, result, seen, starts or {}, logs, sums)
        if is_over or not seen.is_over:
            return exact


def _combine_once(
    metrics: Sequence[Any],
    result: Callable[[], Any],
    seen: UpdateCounts,
    starts: Mapping[int, MetricState],
    logs: Any,
    sums: Collection[Path] | None,
) -> tuple[Any, bool]:
    """Return the value of `global_result`, and whether it is over on all ranks."""
    stateful = stateful_metrics(metrics)
    with comm.raise_on_all():
        facts = _facts(stateful, logs)
        begun = [starts.get(id(metric)) for metric in stateful]
        states = [
            (read_state(metric).leave_out(start), start)
            for metric, start in zip(stateful, begun, strict=True)
            if seen.has_rows
        ]
    facts_by_rank, counts, by_rank = zip(
        *comm.gather((facts, seen, states)), strict=True
    )
    comm.check_equal(facts_by_rank, advice=_ADVICE)
    is_over = all(count.is_over for count in counts)
    counted = [rank for rank in range(comm.size()) if counts[rank].has_rows]
    fractions = weights([counts[rank].rows for rank in counted])
    found_states = zip(*(by_rank[rank] for rank in counted), strict=True)
    pairs = zip(stateful, found_states, strict=True)
    with preserve_metrics(stateful):
        # A metric that merges may be inside of one that does not: it comes last.
        for metric, found in sorted(pairs, key=lambda pair: merges(pair[0])):
            own_states, own_starts = zip(*found, strict=True)
            combine_states(metric, own_states, fractions, own_starts)
        exact = _on_host(result())
        is_of_step = isinstance(logs, Mapping) and set(logs) != set(exact)
        exact_results = _results_by_path(metrics, exact) if is_of_step else {}
    if is_of_step:
        local_results = _results_by_path(metrics, _on_host(result()))
        exact = _last_step_logs(logs, local_results, exact_results, counts, sums)
    if all(map(is_of_keras, stateful)):
        return exact, is_over
    # A metric of the user's may read what is not its own: all ranks decide alike.
    own, *others = everyone = comm.gather(exact)
    if comm.rank() == 0 and any(repr(other) != repr(own) for other in others):
        warn(
            "The results of a metric differ between the ranks, after its state was "
            "combined over them, so it reads something else. Those of the first rank "
            f"count. Received: {everyone}. Keep all of its state in variables "
            "(`add_variable`)."
        )
    return own, is_over


def stateful_metrics(metrics: Sequence[Any]) -> list[Any]:
    """List the metrics that hold state, also those inside other metrics, each once."""
    stateful: dict[int, Any] = {}
    for metric in metrics:
        inner = [] if merges(metric) else _inner(metric)
        nested = {id(variable) for other in inner for variable in other.variables}
        has_variables = any(id(variable) not in nested for variable in metric.variables)
        # Keras's container for the metrics of `compile` has a list of them.
        is_container = isinstance(getattr(metric, "metrics", None), (list, tuple))
        if has_variables or not (is_of_keras(metric) and (inner or is_container)):
            stateful[id(metric)] = metric
        stateful |= {id(other): other for other in stateful_metrics(inner)}
    return list(stateful.values())


def list_metrics(model: Any) -> list[Any]:
    """List the metrics of a model that hold state, also before Keras builds them."""
    return stateful_metrics([*model.metrics, *private.given_metrics(model)])


def list_own_metrics(model: Any) -> list[Any]:
    """List the user's metrics: Keras's keep nothing in Python, and begin at 0."""
    return [metric for metric in list_metrics(model) if not is_of_keras(metric)]


def weights(rows: Sequence[int]) -> list[float]:
    """Compute each rank's fraction of all rows that the metrics have seen.

    The fractions are equal if no rank has counted its rows.
    """
    total = sum(rows)
    return [count / total if total else 1 / len(rows) for count in rows]


def _facts(metrics: Sequence[Any], logs: Any) -> dict[str, Any]:
    """Return what has to be equal on all ranks, or they cannot be combined."""
    facts: dict[str, Any] = {"the metrics": [metric.name for metric in metrics]}
    for metric in metrics:
        shapes = [f"{tuple(v.shape)} {rule_of(v)}" for v in metric.variables]
        facts.setdefault(f"the state of the metric {metric.name!r}", []).append(shapes)
    if isinstance(logs, Mapping):
        paths = [path for path, _ in keras.tree.flatten_with_path(logs)]
        names = sorted("/".join(map(str, path)) for path in paths)
        facts["the names in the logs"] = names
    return facts


def _results_by_path(metrics: Sequence[Any], results: Any) -> dict[Path, np.ndarray]:
    """Collect all results that a step may have returned, by index of metric and path.

    The index of `results`, which is what `result()` returns now, is -1.
    """
    by_index = {-1: results}
    for index, metric in enumerate(metrics):
        # One that was never updated may have no result; then no step has returned it.
        with contextlib.suppress(Exception):
            by_index[index] = {metric.name: _on_host(metric.result())}
    return _arrays_by_path(by_index)


def _last_step_logs(
    logs: Mapping[str, Any],
    local: Mapping[Path, np.ndarray],
    exact: Mapping[Path, np.ndarray],
    seen: Sequence[UpdateCounts],
    sums: Collection[Path] | None,
) -> Any:
    """Compute what the last step of one process would have returned; one gather.

    A value that equals the result of a metric on each rank is replaced by its result
    over all ranks. Other values are added up, or averaged by the rows of the last
    batch, over the ranks that had rows in the last step: what a copied batch left is
    not that of any metric. In an evaluation the last batch is one rank's.

    Args:
        logs: What this rank's last step returned, also in dicts and lists inside.
        local: Results of this rank's metrics.
        exact: Results of the metrics over all ranks.
        seen: How much data the metrics of each rank have been updated with.
    """
    values = {
        path: (array, [key for key in local if _is_equal(array, local[key])])
        for path, array in _arrays_by_path(logs).items()
    }
    last = max(counts.steps for counts in seen if counts.has_rows)
    made = [
        (found, counts.last_rows)
        for found, counts in zip(comm.gather(values), seen, strict=True)
        if counts.has_rows and counts.steps == last
    ]
    weighted = zip(made, weights([rows for _, rows in made]), strict=True)
    counted = [(found, fraction) for (found, _), fraction in weighted if fraction]

    def global_value(path: Path, value: Any) -> Any:
        if path not in values:
            return value  # not a number
        arrays, keys = zip(*(found[path] for found, _ in counted), strict=True)
        key = _find_metric(path, keys, exact)
        if key is not None:
            return _on_host(exact[key])
        if sums is None:
            return _on_host(arrays[-1])  # it has the last batch
        if len({array.shape for array in arrays}) > 1:
            return _on_host(arrays[0])  # values by row: at least equal on all ranks
        rule = "sum" if path in sums else "mean"
        fractions = [fraction for _, fraction in counted]
        return _on_host(combine(rule, arrays, fractions))

    flat = keras.tree.flatten_with_path(logs)
    return keras.tree.pack_sequence_as(logs, [global_value(*pair) for pair in flat])


def _find_metric(
    path: Path, keys: Sequence[Sequence[Path]], exact: Mapping[Path, np.ndarray]
) -> Path | None:
    """Find the result that a value in the logs is; `None` if unknown or none.

    Args:
        path: Path of the value.
        keys: For each rank, the results that its value is equal to.
        exact: Results over all ranks.
    """
    common = [k for k in keys[0] if k in exact and all(k in other for other in keys)]
    named = [key for key in common if key[-1] == path[-1]]
    if named:
        return named[0]
    # Two metrics may be equal on all ranks by chance, and not over all ranks.
    is_clear = all(_is_equal(exact[key], exact[common[0]]) for key in common)
    return common[0] if common and is_clear else None


def _on_host(result: Any) -> Any:
    """Copy a metric's result into Python numbers and NumPy arrays."""

    def read(value: Any) -> Any:
        array = comm.to_array(value)
        return array.item() if array.ndim == 0 else array

    return keras.tree.map_structure(read, result)


def _arrays_by_path(logs: Any) -> dict[Path, np.ndarray]:
    """Convert the numbers in some logs to float64 arrays, each by its path."""
    arrays = {}
    for path, value in keras.tree.flatten_with_path(logs):
        with contextlib.suppress(TypeError, ValueError):
            arrays[path] = np.asarray(comm.to_array(value), np.float64)
    return arrays


def _is_equal(value: np.ndarray, result: np.ndarray) -> bool:
    """Compare a value that a step returned with a metric's result, up to rounding."""
    return result.shape == value.shape and np.allclose(
        value, result, rtol=1e-5, atol=0, equal_nan=True
    )


def _inner(metric: Any) -> list[Any]:
    lists = (getattr(metric, name, None) for name in ("metrics", private.METRICS))
    nested = [m for found in lists if isinstance(found, (list, tuple)) for m in found]
    return [inner for inner in nested if isinstance(inner, keras.metrics.Metric)]
