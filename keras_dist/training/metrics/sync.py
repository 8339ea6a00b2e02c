"""Metrics over the rows of all ranks: synchronize their state, then take `result()`.

Each rank sends a report on its metrics; if all match, one allreduce sums, averages or
copies the state of all metrics, and `result()` is read before the state is restored.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.training.metrics.step_logs import Path, leaves_of, map_leaves, names_of
from keras_dist.training.remember import preserve_variables

_ADVICE = "Compile and track the same metrics on every rank."


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
        report = _report_of_rank(stateful, seen or UpdateCounts(), logs)
    reports = comm.gather(report)
    _check(reports)
    with _synchronized(stateful, reports):
        exact = _on_host(result())
        is_of_step = isinstance(logs, Mapping) and set(logs) != set(exact)
        exact_results = _results_of_each(metrics, exact) if is_of_step else {}
    if not is_of_step:
        return exact
    own_results = _results_of_each(metrics, _on_host(result()))
    seen_by_rank = [report.seen for report in reports]
    return _logs_of_last_step(logs, own_results, exact_results, seen_by_rank)


def stateful_metrics(metrics: Sequence[Any]) -> list[Any]:
    """List the metrics that hold state, also those inside other metrics, each once."""
    stateful: dict[int, Any] = {}
    for metric in metrics:
        inner = [] if merges(metric) else _inner(metric)
        own = {id(variable) for variable in metric.variables}
        own -= {id(variable) for nested in inner for variable in nested.variables}
        if own or not (inner or _is_container(metric)):
            stateful[id(metric)] = metric
        stateful |= {id(nested): nested for nested in stateful_metrics(inner)}
    return list(stateful.values())


def merges(metric: Any) -> bool:
    """Tell whether a metric synchronizes its state itself, by `merge_states`."""
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
    special = []
    for metric in stateful_metrics([*metrics, *_given_to_compile(metrics)]):
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


def synchronized(
    variables: Sequence[Any], states: Sequence[np.ndarray], seen: Sequence[UpdateCounts]
) -> list[np.ndarray]:
    """Synchronize the values of metric variables over all ranks, each by its own rule.

    One allreduce sums all of them: each rank sends its state × 1 or 0 where the rule is
    "sum" or "first", and × its fraction of all rows where the rule is "mean".

    Args:
        variables: Variables of metrics, the same on every rank.
        states: This rank's values of the variables.
        seen: How much data the metrics of each rank have been updated with, in rank
            order.

    Returns:
        The synchronized value of each variable: int64 for integers that are not
        averaged, else float64.
    """
    fractions = weights(seen)
    is_first = [fraction > 0 for fraction in fractions].index(True) == comm.rank()
    fraction = fractions[comm.rank()]
    has_rows = seen[comm.rank()].has_rows
    factors = {"sum": has_rows, "first": is_first, "mean": fraction}
    sent, counts = [], []
    for variable, state in zip(variables, states, strict=True):
        encoded = _encoded(state, factors[rule_of(variable)])
        sent += encoded
        counts.append(len(encoded))
    received = iter(
        comm.sum_tensors(
            [tf.constant(array) for array in sent],
            name="keras_dist.metrics",
            dtype=tf.float64,
        )
    )
    return [
        _decoded([next(received).numpy() for _ in range(count)]) for count in counts
    ]


def weights(seen: Sequence[UpdateCounts]) -> list[float]:
    """Compute each rank's fraction of all rows that the metrics have seen."""
    rows = [of_rank.rows * of_rank.has_rows for of_rank in seen]
    # If no rank has counted its rows, those that have rows get equal fractions.
    rows = rows if any(rows) else [int(of_rank.has_rows) for of_rank in seen]
    return [of_rank / sum(rows) for of_rank in rows]


def weighted_mean(results: Sequence[Any], seen: Sequence[UpdateCounts]) -> Any:
    """Average the ranks' results, weighted by their rows, in float64.

    Args:
        results: Of each rank, all of the same structure.
        seen: How much data the metrics of each of these ranks have been updated with.
    """
    fractions = weights(seen)

    def mean(*values: Any) -> Any:
        pairs = zip(values, fractions, strict=True)
        return sum(
            np.multiply(value, fraction) for value, fraction in pairs if fraction
        )

    return keras.tree.map_structure(mean, *results)


@dataclass(frozen=True)
class _RankReport:
    """What one rank sends to the others about its metrics.

    Args:
        states: Name of each metric, and shape and rule of each of its variables.
        seen: How much data they have been updated with.
        log_names: Names that the last step returned, as `names_of`; `None` if the logs
            are not to be synchronized.
        merging: States of the metrics that have a method `merge_states`.
        results: Results of the metrics that have no variables.
    """

    states: list[tuple[str, list[str]]]
    seen: UpdateCounts
    log_names: list[str] | None
    merging: list[list[np.ndarray]]
    results: list[Any]


def _report_of_rank(
    metrics: Sequence[Any], seen: UpdateCounts, logs: Any
) -> _RankReport:
    """Make this rank's report.

    Args:
        metrics: The metrics that hold state.
        seen: How much data they have been updated with.
        logs: What the last step returned, or `None`.
    """
    states = [
        (metric.name, [f"{tuple(v.shape)} {rule_of(v)}" for v in metric.variables])
        for metric in metrics
    ]
    counted = metrics if seen.has_rows else []
    return _RankReport(
        states,
        seen,
        names_of(logs) if isinstance(logs, Mapping) else None,
        [_arrays_of(metric.variables) for metric in counted if merges(metric)],
        [_on_host(metric.result()) for metric in counted if _is_without_state(metric)],
    )


def _check(reports: Sequence[_RankReport]) -> None:
    """Raise an error if the ranks' metrics differ: their allreduce would never end.

    Args:
        reports: Of all ranks, in rank order.

    Raises:
        ValueError: The same on all ranks.
    """
    names = [Counter(name for name, _ in report.states) for report in reports]
    # Each with the first rank's: with each other, a thousand ranks are a million pairs.
    pairs = [(0, rank) for rank in range(len(names))]
    for rank, other in [*pairs, *((rank, 0) for _, rank in pairs)]:
        for name in names[rank] - names[other]:
            raise ValueError(
                f"Rank {rank} has the metric {name!r}, which rank {other} does "
                f"not have. Received: {_listed(map(sorted, names))}. {_ADVICE}"
            )
    for states in zip(*(report.states for report in reports), strict=True):
        if any(state != states[0] for state in states):
            raise ValueError(
                f"The ranks disagree on the state of the metric {states[0][0]!r}. "
                f"Received: {_listed(states)}. {_ADVICE}"
            )
    logged = [report.log_names for report in reports]
    if any(log_names != logged[0] for log_names in logged):
        raise ValueError(
            "The ranks disagree on the names in the logs. Received: "
            f"{_listed(logged)}. Log the same names on every rank."
        )


@contextlib.contextmanager
def _synchronized(
    metrics: Sequence[Any], reports: Sequence[_RankReport]
) -> Iterator[None]:
    """Inside the block, the metrics have the state of one process on all rows."""
    merging = [metric for metric in metrics if merges(metric)]
    merged = {id(v): v for metric in merging for v in metric.variables}
    others = {
        id(v): v for metric in metrics for v in metric.variables if id(v) not in merged
    }
    without_state = [metric for metric in metrics if _is_without_state(metric)]
    changed = [*others.values(), *merged.values()]
    own_states = _arrays_of(changed)
    seen = [report.seen for report in reports]
    values = synchronized(list(others.values()), own_states[: len(others)], seen)
    counted = [report for report in reports if report.seen.has_rows]
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_variables(changed))
        for variable, value in zip(others.values(), values, strict=True):
            if value.dtype.kind == "f" and keras.backend.is_int_dtype(variable.dtype):
                value = np.rint(value)  # an average of integers
            variable.assign(keras.ops.cast(value, variable.dtype))
        for index, metric in enumerate(merging):
            metric.merge_states([report.merging[index] for report in counted])
        for index, metric in enumerate(without_state):
            mean = weighted_mean(
                [report.results[index] for report in counted],
                [report.seen for report in counted],
            )
            object.__setattr__(metric, "result", lambda mean=mean: mean)
            stack.callback(metric.__dict__.pop, "result", None)
        yield


def _results_of_each(metrics: Sequence[Any], results: Any) -> dict[Path, np.ndarray]:
    """Collect all results that a step may have returned, by index of metric and path.

    Args:
        metrics: See `global_result`.
        results: What `result()` returns now; its index is -1.
    """
    found = {-1: results}
    for index, metric in enumerate(metrics):
        # One that was never updated may have no result; then no step has returned it.
        with contextlib.suppress(Exception):
            found[index] = {metric.name: _on_host(metric.result())}
    arrays = {path: _array_or_none(leaf) for path, leaf in leaves_of(found).items()}
    return {path: array for path, array in arrays.items() if array is not None}


def _logs_of_last_step(
    logs: Mapping[str, Any],
    own: Mapping[Path, np.ndarray],
    exact: Mapping[Path, np.ndarray],
    everyone: Sequence[UpdateCounts],
) -> Any:
    """Compute what the last step of one process would have returned; one gather.

    A value that equals the result of a metric on each rank is replaced by its result
    over all ranks. Other values are averaged, weighted by the rows of the last batch,
    over the ranks that had rows in the last step: in an evaluation some ranks may have
    one batch less, and what a copied batch left is not that of any metric.

    Args:
        logs: What this rank's last step returned, also in dicts and lists inside.
        own: Results of this rank's metrics.
        exact: Results of the metrics over all ranks.
        everyone: How much data the metrics of each rank have been updated with.
    """
    arrays = {path: _array_or_none(leaf) for path, leaf in leaves_of(logs).items()}
    values = {
        path: (array, [key for key in own if _is_equal(array, own[key])])
        for path, array in arrays.items()
        if array is not None
    }
    last = max(seen.steps for seen in everyone if seen.has_rows)
    made = [seen.has_rows and seen.steps == last for seen in everyone]
    counts = any(seen.last_rows for seen in everyone)
    last_batches = [
        UpdateCounts(
            seen.last_rows, has_rows=is_made and (seen.last_rows > 0 or not counts)
        )
        for seen, is_made in zip(everyone, made, strict=True)
    ]
    gathered = zip(comm.gather(values), last_batches, strict=True)
    counted = [(of_rank, seen) for of_rank, seen in gathered if seen.has_rows]

    def of_all(path: Path, value: Any) -> Any:
        if path not in values:
            return value  # not a number
        found = [of_rank[path] for of_rank, _ in counted]
        key = _metric_of(path, [keys for _, keys in found], exact)
        if key is not None:
            return _on_host(exact[key])
        if len({array.shape for array, _ in found}) > 1:
            return _on_host(found[0][0])  # values by row: at least equal on all ranks
        seen = [of_rank for _, of_rank in counted]
        return _on_host(weighted_mean([array for array, _ in found], seen))

    return map_leaves(of_all, logs)


def _metric_of(
    path: Path, found: Sequence[Sequence[Path]], exact: Mapping[Path, np.ndarray]
) -> Path | None:
    """Find the result that a value in the logs is; `None` if unknown or none.

    Args:
        path: Of the value.
        found: For each rank the results that its value is equal to.
        exact: Results over all ranks.
    """
    common = [key for key in found[0] if all(key in keys for keys in found)]
    common = [key for key in common if key in exact]
    named = [key for key in common if key[-1] == path[-1]]
    if named:
        return named[0]
    # Two metrics may be equal on all ranks by chance, and not over all ranks.
    is_clear = all(_is_equal(exact[key], exact[common[0]]) for key in common)
    return common[0] if common and is_clear else None


def _encoded(state: np.ndarray, factor: float) -> list[np.ndarray]:
    """Encode `state` × `factor` as float64 arrays; sums of integers stay exact.

    A float64 has 53 bits. So an int64 is sent as two arrays of 32 bits each, which
    leaves 21 bits for the sum over the ranks.
    """
    is_whole = state.dtype.kind in "iub" and isinstance(factor, bool)
    if not is_whole:
        # A state that is not counted may be infinite, and infinity × 0 is NaN.
        state = state.astype(np.float64)
        return [state * factor if factor else np.zeros_like(state)]
    whole = state.astype(np.int64) * int(factor)
    return [(whole >> 32).astype(np.float64), (whole & 0xFFFFFFFF).astype(np.float64)]


def _decoded(encoded: list[np.ndarray]) -> np.ndarray:
    if len(encoded) == 1:
        return encoded[0]
    high, low = (half.astype(np.int64) for half in encoded)
    return (high << 32) + low


def _arrays_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """Copy the values of some variables."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _on_host(result: Any) -> Any:
    """Copy a metric's result into Python numbers and NumPy arrays."""

    def copy(value: Any) -> Any:
        array = np.array(keras.ops.convert_to_numpy(value))
        return array.item() if array.ndim == 0 else array

    return keras.tree.map_structure(copy, result)


def _array_or_none(value: Any) -> Any:
    """Convert `value` to a float64 array; `None` if it is not numeric."""
    try:
        return np.asarray(keras.ops.convert_to_numpy(value), np.float64)
    except (TypeError, ValueError):
        return None


def _is_equal(value: np.ndarray, result: np.ndarray) -> bool:
    """Compare a value that a step returned with a metric's result, up to rounding."""
    return result.shape == value.shape and np.allclose(
        value, result, rtol=1e-5, atol=0, equal_nan=True
    )


def _is_without_state(metric: Any) -> bool:
    """Tell whether a metric keeps what it remembers in Python attributes alone."""
    return not metric.variables and not merges(metric)


def _given_to_compile(metrics: Sequence[Any]) -> list[Any]:
    leaves = keras.tree.flatten([private.given_metrics(metric) for metric in metrics])
    return [leaf for leaf in leaves if isinstance(leaf, keras.metrics.Metric)]


def _inner(metric: Any) -> list[Any]:
    # Keras's container for the metrics of `compile` lists them in `metrics`.
    nested = [*_list(metric, "metrics"), *_list(metric, private.METRICS)]
    return [inner for inner in nested if isinstance(inner, keras.metrics.Metric)]


def _list(metric: Any, name: str) -> list[Any]:
    value = getattr(metric, name, None)
    return list(value) if isinstance(value, (list, tuple)) else []


def _is_container(metric: Any) -> bool:
    """Tell whether it is Keras's container for the metrics of `compile`."""
    return isinstance(getattr(metric, "metrics", None), (list, tuple))


def _listed(values: Any) -> str:
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
