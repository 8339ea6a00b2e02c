"""Results of metrics over the rows of all ranks."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.training.metrics import states
from keras_dist.training.metrics.rank_report import (
    RankReport,
    Seen,
    arrays_of,
    check,
    on_host,
    report_of_rank,
)
from keras_dist.training.metrics.stateful import (
    is_without_state,
    merges,
    stateful_metrics,
)
from keras_dist.training.metrics.step_logs import Path, leaves_of, map_leaves


def global_result(
    metrics: Sequence[Any],
    result: Callable[[], Any],
    *,
    seen: Seen | None = None,
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
      for the variables of metrics; `"only_first_replica"`, the first rank's value;
      `"mean"` or none, an average weighted by rows.
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
    reports = comm.gather_or_raise(
        lambda: report_of_rank(stateful, seen or Seen(), logs)
    )
    check(reports)
    with _synchronized(stateful, reports):
        exact = on_host(result())
        is_of_step = isinstance(logs, Mapping) and set(logs) != set(exact)
        exact_results = _results_of_each(metrics, exact) if is_of_step else {}
    if not is_of_step:
        return exact
    own_results = _results_of_each(metrics, on_host(result()))
    seen_by_rank = [report.seen for report in reports]
    return _logs_of_last_step(logs, own_results, exact_results, seen_by_rank)


@contextlib.contextmanager
def _synchronized(
    metrics: Sequence[Any], reports: Sequence[RankReport]
) -> Iterator[None]:
    """Inside the block, the metrics have the state of one process on all rows."""
    merging = [metric for metric in metrics if merges(metric)]
    merged = {id(v): v for metric in merging for v in metric.variables}
    others = {
        id(v): v for metric in metrics for v in metric.variables if id(v) not in merged
    }
    without_state = [metric for metric in metrics if is_without_state(metric)]
    changed = [*others.values(), *merged.values()]
    own_states = arrays_of(changed)
    seen = [report.seen for report in reports]
    values = states.synchronized(list(others.values()), own_states[: len(others)], seen)
    counted = [report for report in reports if report.seen.has_rows]
    try:
        for variable, value in zip(others.values(), values, strict=True):
            if value.dtype.kind == "f" and keras.backend.is_int_dtype(variable.dtype):
                value = np.rint(value)  # an average of integers
            variable.assign(keras.ops.cast(value, variable.dtype))
        for index, metric in enumerate(merging):
            metric.merge_states([report.merging[index] for report in counted])
        for index, metric in enumerate(without_state):
            mean = states.average(
                [report.results[index] for report in counted],
                [report.seen for report in counted],
            )
            object.__setattr__(metric, "result", lambda mean=mean: mean)
        yield
    finally:
        for metric in without_state:
            metric.__dict__.pop("result", None)
        for variable, state in zip(changed, own_states, strict=True):
            variable.assign(state)


def _results_of_each(metrics: Sequence[Any], results: Any) -> dict[Path, np.ndarray]:
    """All results that a step may have returned, by the index of the metric and path.

    Args:
        metrics: As of `global_result`.
        results: What `result()` returns now; its index is -1.
    """
    found = {-1: results}
    for index, metric in enumerate(metrics):
        # One that was never updated may have no result; then no step has returned it.
        with contextlib.suppress(Exception):
            found[index] = {metric.name: on_host(metric.result())}
    arrays = {path: _array_or_none(leaf) for path, leaf in leaves_of(found).items()}
    return {path: array for path, array in arrays.items() if array is not None}


def _logs_of_last_step(
    logs: Mapping[str, Any],
    own: Mapping[Path, np.ndarray],
    exact: Mapping[Path, np.ndarray],
    everyone: Sequence[Seen],
) -> Any:
    """What the last step of one process would have returned; one gather.

    A value that equals the result of a metric on each rank is replaced by its result
    over all ranks. Other values are averaged, weighted by the rows of the last batch,
    over the ranks that made the last step: in an evaluation some ranks may have one
    batch less.

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
    last_batches = [
        Seen(seen.last_rows, has_rows=seen.has_rows and seen.steps == last)
        for seen in everyone
    ]
    gathered = zip(comm.gather(values), last_batches, strict=True)
    counted = [(of_rank, seen) for of_rank, seen in gathered if seen.has_rows]

    def of_all(path: Path, value: Any) -> Any:
        if path not in values:
            return value  # not a number
        found = [of_rank[path] for of_rank, _ in counted]
        key = _metric_of(path, [keys for _, keys in found], exact)
        if key is not None:
            return on_host(exact[key])
        if len({array.shape for array, _ in found}) > 1:
            return on_host(found[0][0])  # values by row: at least equal on all ranks
        seen = [of_rank for _, of_rank in counted]
        return on_host(states.average([array for array, _ in found], seen))

    return map_leaves(of_all, logs)


def _metric_of(
    path: Path, found: Sequence[Sequence[Path]], exact: Mapping[Path, np.ndarray]
) -> Path | None:
    """The result that a value in the logs is; `None` if it is none, or nobody knows.

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


def _array_or_none(value: Any) -> Any:
    """`value` as a float64 array, or `None` if it is not numeric."""
    try:
        return np.asarray(keras.ops.convert_to_numpy(value), np.float64)
    except (TypeError, ValueError):
        return None


def _is_equal(value: np.ndarray, result: np.ndarray) -> bool:
    """Whether a value that a step returned equals a metric's result, up to rounding."""
    return result.shape == value.shape and np.allclose(
        value, result, rtol=1e-5, atol=0, equal_nan=True
    )
