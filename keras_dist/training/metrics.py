"""Metrics over the rows of all ranks: synchronize their state, then take `result()`.

An allreduce sums, averages or copies the state of all metrics, and `result()` is read
before the state is restored.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.training.remember import preserve_variables

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
    """

    rows: int = 0
    steps: int = 0
    last_rows: int = 0
    has_rows: bool = True


def global_result(
    metrics: Sequence[Any],
    result: Callable[[], Any],
    *,
    seen: UpdateCounts | None = None,
    logs: Any = None,
) -> Any:
    """`result()` as if one process had updated the metrics with the rows of all ranks.

    Results cannot be averaged: the mean of two ranks' AUC is not the AUC. But the state
    of nearly all metrics can be summed (totals, counts, confusion matrices). So the
    state of all metrics is synchronized by one allreduce, `result()` is called, and
    this rank's own state is restored. How the state of a metric is synchronized:

    - A method `merge_states(states)` of the metric is called with the states of all
      ranks that have rows, each a list of arrays in the order of `variables`, and sets
      the metric's own state.
    - Without it, the `aggregation` of each variable decides: `"sum"`, which Keras sets
      for the variables of metrics; `"only_first_replica"`, that of the first rank with
      rows; `"mean"` or none, an average weighted by rows.
    - If the metric has no variables, its results are averaged, weighted by rows.

    Args:
        metrics: `keras.metrics.Metric` objects, the same ones on every rank.
        result: Function that reads the metrics, such as `Model.get_metrics_result`.
        seen: How much data this rank's metrics have been updated with.
        logs: What this rank's last step returned, or `None`. Keras logs it instead of
            `result()` if their names differ.

    Returns:
        The values of `result()`; or, if `logs` has other names, what the last step of
        one process would have returned, in the structure of `logs`.

    Raises:
        ValueError: On all ranks, if they do not have the same metrics, with states of
            the same shapes, or do not log the same names.
    """
    if comm.size() == 1:
        return result()
    stateful = stateful_metrics(metrics)
    with comm.together():
        facts = _facts(stateful, logs)
        report = _make_report(stateful, seen or UpdateCounts())
    comm.agree(facts, advice=_ADVICE)
    reports = comm.gather(report)
    with _synchronized(stateful, reports):
        exact = _on_host(result())
        is_of_step = isinstance(logs, Mapping) and set(logs) != set(exact)
        exact_results = _results_by_path(metrics, exact) if is_of_step else {}
    if not is_of_step:
        return exact
    local_results = _results_by_path(metrics, _on_host(result()))
    counts = [report.seen for report in reports]
    return _last_step_logs(logs, local_results, exact_results, counts)


def stateful_metrics(metrics: Sequence[Any]) -> list[Any]:
    """List the metrics that hold state, also those inside other metrics, each once."""
    stateful: dict[int, Any] = {}
    for metric in metrics:
        inner = [] if merges(metric) else _inner(metric)
        nested = {id(variable) for other in inner for variable in other.variables}
        has_variables = any(id(variable) not in nested for variable in metric.variables)
        # Keras's container for the metrics of `compile` has a list of them.
        is_container = isinstance(getattr(metric, "metrics", None), (list, tuple))
        if has_variables or not (inner or is_container):
            stateful[id(metric)] = metric
        stateful |= {id(other): other for other in stateful_metrics(inner)}
    return list(stateful.values())


def merges(metric: Any) -> bool:
    """Return True if a metric synchronizes its state itself, by `merge_states`."""
    return callable(getattr(metric, "merge_states", None))


def rule_of(variable: Any) -> str:
    """Name the rule of a variable: "sum", "first" (rank's value) or "mean"."""
    aggregation = getattr(variable, "aggregation", "sum")
    return {"sum": "sum", "only_first_replica": "first"}.get(aggregation, "mean")


def exceptions(metrics: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """List name and rule of each metric whose state is not summed, for the plan.

    It may be incomplete for a model that is not built: some metrics create their
    variables at the first batch.

    Args:
        metrics: `Model.metrics`, also of a model that is not built.
    """
    given = keras.tree.flatten([private.given_metrics(metric) for metric in metrics])
    given = [leaf for leaf in given if isinstance(leaf, keras.metrics.Metric)]
    special = []
    for metric in stateful_metrics([*metrics, *given]):
        rules = {rule_of(variable) for variable in metric.variables}
        if merges(metric):
            special.append((metric.name, "by its own merge_states"))
        elif "mean" in rules:
            special.append((metric.name, "state averaged by rows"))
        elif "first" in rules:
            special.append((metric.name, "the first rank's state"))
        elif not rules and not type(metric).__module__.startswith("keras."):
            # It may still create variables at the first batch, as some of Keras's own
            # metrics do.
            special.append(
                (metric.name, "result averaged by rows if without variables")
            )
    return tuple(special)


def weights(seen: Sequence[UpdateCounts]) -> list[float]:
    """Compute each rank's fraction of all rows that the metrics have seen."""
    rows = [counts.rows * counts.has_rows for counts in seen]
    # If no rank has counted its rows, those that have rows get equal fractions.
    rows = rows if any(rows) else [int(counts.has_rows) for counts in seen]
    return [count / sum(rows) for count in rows]


@dataclass(frozen=True)
class _Report:
    """What one rank sends to the others about its metrics.

    Args:
        seen: How much data they have been updated with.
        merging: States of the metrics that have a method `merge_states`.
        results: Results of the metrics that have no variables.
    """

    seen: UpdateCounts
    merging: list[list[np.ndarray]]
    results: list[Any]


def _facts(metrics: Sequence[Any], logs: Any) -> dict[str, Any]:
    """Return what has to be equal on all ranks, or their allreduce would never end."""
    facts: dict[str, Any] = {"the metrics": [metric.name for metric in metrics]}
    for metric in metrics:
        shapes = [f"{tuple(v.shape)} {rule_of(v)}" for v in metric.variables]
        facts.setdefault(f"the state of the metric {metric.name!r}", []).append(shapes)
    if isinstance(logs, Mapping):
        paths = [path for path, _ in keras.tree.flatten_with_path(logs)]
        names = sorted("/".join(map(str, path)) for path in paths)
        facts["the names in the logs"] = names
    return facts


def _make_report(metrics: Sequence[Any], seen: UpdateCounts) -> _Report:
    counted = metrics if seen.has_rows else []
    return _Report(
        seen,
        [_arrays_of(metric.variables) for metric in counted if merges(metric)],
        [_on_host(metric.result()) for metric in counted if _is_without_state(metric)],
    )


@contextlib.contextmanager
def _synchronized(metrics: Sequence[Any], reports: Sequence[_Report]) -> Iterator[None]:
    """Context manager in which metrics have the state of one process on all rows."""
    merging = [metric for metric in metrics if merges(metric)]
    merged = {id(v): v for metric in merging for v in metric.variables}
    others = {
        id(v): v for metric in metrics for v in metric.variables if id(v) not in merged
    }
    values = _synchronize(list(others.values()), [report.seen for report in reports])
    counted = [report for report in reports if report.seen.has_rows]
    fractions = weights([report.seen for report in counted])
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_variables([*others.values(), *merged.values()]))
        for variable, value in zip(others.values(), values, strict=True):
            if value.dtype.kind == "f" and keras.backend.is_int_dtype(variable.dtype):
                value = np.rint(value)  # an average of integers
            variable.assign(keras.ops.cast(value, variable.dtype))
        for index, metric in enumerate(merging):
            metric.merge_states([report.merging[index] for report in counted])
        for index, metric in enumerate(filter(_is_without_state, metrics)):
            mean = _weighted_mean([r.results[index] for r in counted], fractions)
            object.__setattr__(metric, "result", lambda mean=mean: mean)
            stack.callback(metric.__dict__.pop, "result", None)
        yield


def _synchronize(
    variables: Sequence[Any], seen: Sequence[UpdateCounts]
) -> list[np.ndarray]:
    """Compute the value of each variable over all ranks, by its rule.

    One allreduce sums all floats, and one all integers, whose sums are exact. Each rank
    sends its state × 1 or 0 where the rule is "sum" or "first", and × its
    fraction of all rows where the rule is "mean".

    Args:
        variables: Variables of metrics, the same on every rank.
        seen: How much data the metrics of each rank have been updated with, in rank
            order.

    Returns:
        int64 for integers that are not averaged, else float64.
    """
    rank, fractions = comm.rank(), weights(seen)
    is_first = [fraction > 0 for fraction in fractions].index(True) == rank
    factors = {
        "sum": seen[rank].has_rows,
        "first": is_first,
        "mean": fractions[rank],
    }
    sent = [
        _times(state, factors[rule_of(variable)])
        for variable, state in zip(variables, _arrays_of(variables), strict=True)
    ]
    synchronized: dict[int, np.ndarray] = {}
    for dtype in (tf.float64, tf.int64):
        indices = [
            i for i, array in enumerate(sent) if tf.as_dtype(array.dtype) is dtype
        ]
        sums = comm.sum_tensors(
            [tf.constant(sent[index]) for index in indices],
            name=f"keras_dist.metrics.{dtype.name}",
            dtype=dtype,
        )
        for index, total in zip(indices, sums, strict=True):
            synchronized[index] = total.numpy()
    return [synchronized[index] for index in range(len(sent))]


def _times(state: np.ndarray, factor: float) -> np.ndarray:
    if state.dtype.kind in "iub" and isinstance(factor, bool):
        return state.astype(np.int64) * int(factor)
    state = state.astype(np.float64)
    # A state that is not counted may be infinite, and infinity × 0 is NaN.
    return state * factor if factor else np.zeros_like(state)


def _weighted_mean(results: Sequence[Any], fractions: Sequence[float]) -> Any:
    """Average results of the same structure in float64, weighted by fractions."""

    def mean(*values: Any) -> Any:
        pairs = zip(values, fractions, strict=True)
        return sum(
            np.multiply(value, fraction) for value, fraction in pairs if fraction
        )

    return keras.tree.map_structure(mean, *results)


def _results_by_path(metrics: Sequence[Any], results: Any) -> dict[Path, np.ndarray]:
    """Collect all results that a step may have returned, by index of metric and path.

    Args:
        metrics: See `global_result`.
        results: What `result()` returns now; its index is -1.
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
) -> Any:
    """Compute what the last step of one process would have returned; one gather.

    A value that equals the result of a metric on each rank is replaced by its result
    over all ranks. Other values are averaged, weighted by the rows of the last batch,
    over the ranks that had rows in the last step: in an evaluation some ranks may have
    one batch less, and what a copied batch left is not that of any metric.

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
    made = [counts.has_rows and counts.steps == last for counts in seen]
    fractions = weights(
        [UpdateCounts(c.last_rows, has_rows=m) for c, m in zip(seen, made, strict=True)]
    )
    gathered = zip(comm.gather(values), fractions, strict=True)
    counted = [(found, fraction) for found, fraction in gathered if fraction]

    def global_value(path: Path, value: Any) -> Any:
        if path not in values:
            return value  # not a number
        arrays, keys = zip(*(found[path] for found, _ in counted), strict=True)
        key = _find_metric(path, keys, exact)
        if key is not None:
            return _on_host(exact[key])
        if len({array.shape for array in arrays}) > 1:
            return _on_host(arrays[0])  # values by row: at least equal on all ranks
        return _on_host(_weighted_mean(arrays, [fraction for _, fraction in counted]))

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


def _arrays_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """Copy the values of some variables."""
    return [comm.to_array(variable) for variable in variables]


def _on_host(result: Any) -> Any:
    """Copy a metric's result into Python numbers and NumPy arrays."""

    def copy(value: Any) -> Any:
        array = comm.to_array(value)
        return array.item() if array.ndim == 0 else array

    return keras.tree.map_structure(copy, result)


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


def _is_without_state(metric: Any) -> bool:
    """Return True if a metric keeps what it remembers in Python attributes alone."""
    return not metric.variables and not merges(metric)


def _inner(metric: Any) -> list[Any]:
    lists = (getattr(metric, name, None) for name in ("metrics", private.METRICS))
    nested = [m for found in lists if isinstance(found, (list, tuple)) for m in found]
    return [inner for inner in nested if isinstance(inner, keras.metrics.Metric)]
