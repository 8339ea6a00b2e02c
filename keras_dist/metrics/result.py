"""The results of metrics over all ranks."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.metrics import states
from keras_dist.metrics.rank_report import (
    RankReport,
    Seen,
    arrays_of,
    check,
    on_host,
    report_of_rank,
)
from keras_dist.metrics.stateful import is_plain, merges, stateful_metrics


def global_result(
    metrics: Sequence[Any],
    result: Callable[[], Any],
    *,
    seen: Seen | None = None,
    logs: Any = None,
) -> Any:
    """`result()` as it would be had one process seen the rows of all ranks.

    The state of nearly all metrics adds up (sums, counts, confusion matrices), their
    results do not: the mean of two ranks' AUC is not the AUC. So the states are brought
    together, by one collective for all metrics, and then `result()` is taken.
    Afterwards the metrics hold this rank's own state again. How a state comes together:

    - a metric with a method `merge_states(states)` gets the states of all ranks that
      have rows, each a list of arrays in the order of `variables`, and sets its own;
    - else each variable follows its `aggregation`: `"sum"`, which is what Keras gives
      to the variables of metrics; `"only_first_replica"`, the first rank's; `"mean"`
      or none, an average by rows;
    - a metric without any variable has its result averaged by rows.

    Args:
        metrics: `keras.metrics.Metric` objects, the same ones on every rank.
        result: Reads the metrics, for example `Model.get_metrics_result`.
        seen: What this rank's metrics have been shown.
        logs: What this rank's last step returned, where that counts: Keras logs it
            where its names are not those of `result()`.

    Returns:
        The values of `result()`; or, where the last step returned other names, those
        of a last step on one process.

    Raises:
        ValueError: On all ranks, if they do not hold the same metrics, with states of
            the same shapes, or do not log the same names.
    """
    if comm.size() == 1:
        return result()
    pieces = stateful_metrics(metrics)
    everyone = comm.gather_or_raise(
        lambda: report_of_rank(pieces, seen or Seen(), logs)
    )
    check(everyone)
    with _of_all_ranks(pieces, everyone):
        exact = on_host(result())
    if not isinstance(logs, Mapping) or set(logs) == set(exact):
        return exact
    return _of_last_step(logs, on_host(result()), exact, [t.seen for t in everyone])


@contextlib.contextmanager
def _of_all_ranks(
    pieces: Sequence[Any], everyone: Sequence[RankReport]
) -> Iterator[None]:
    """Inside the block, the metrics are those of one process on all rows."""
    merging = [part for part in pieces if merges(part)]
    merged = {id(v): v for part in merging for v in part.variables}
    others = {
        id(v): v for part in pieces for v in part.variables if id(v) not in merged
    }
    plain = [part for part in pieces if is_plain(part)]
    touched = [*others.values(), *merged.values()]
    own = arrays_of(touched)
    seen = [report.seen for report in everyone]
    values_of_all = states.of_all_ranks(list(others.values()), own[: len(others)], seen)
    counting = [report for report in everyone if report.seen.has_rows]
    try:
        for variable, value in zip(others.values(), values_of_all, strict=True):
            if value.dtype.kind == "f" and keras.backend.is_int_dtype(variable.dtype):
                value = np.rint(value)  # an average of whole numbers
            variable.assign(keras.ops.cast(value, variable.dtype))
        for index, part in enumerate(merging):
            part.merge_states([report.merging[index] for report in counting])
        for index, part in enumerate(plain):
            mean = states.average(
                [report.results[index] for report in counting],
                [report.seen for report in counting],
            )
            object.__setattr__(part, "result", lambda mean=mean: mean)
        yield
    finally:
        for part in plain:
            part.__dict__.pop("result", None)
        for variable, state in zip(touched, own, strict=True):
            variable.assign(state)


def _of_last_step(
    logs: Mapping[str, Any], own: Any, exact: Any, everyone: Sequence[Seen]
) -> dict[str, Any]:
    """What the last step of one process would have returned.

    A value that is the result of the metric of its name is taken over all ranks;
    another one is averaged by the rows of the last batch, over the ranks that have it:
    of a ragged evaluation some ranks may have one batch less.
    """
    values = {name: _number(value) for name, value in logs.items()}
    report = {
        name: (value, _is_same(value, own.get(name)))
        for name, value in values.items()
        if value is not None
    }
    last = max(seen.steps for seen in everyone if seen.has_rows)
    shown = [
        Seen(seen.last_rows, has_rows=seen.has_rows and seen.steps == last)
        for seen in everyone
    ]
    counting = [seen for seen in shown if seen.has_rows]
    agreed = [
        t for t, seen in zip(comm.gather(report), shown, strict=True) if seen.has_rows
    ]
    result = dict(logs)
    for name in report:
        if all(held[name][1] for held in agreed):
            result[name] = exact[name]
        else:
            mean = states.average([held[name][0] for held in agreed], counting)
            result[name] = on_host(mean)
    return result


def _number(value: Any) -> Any:
    """`value` as an array, or `None` where it is no number."""
    try:
        return np.asarray(keras.ops.convert_to_numpy(value), np.float64)
    except (TypeError, ValueError):
        return None


def _is_same(value: np.ndarray, result: Any) -> bool:
    """Whether a value that a step has returned is what the metric says, after it."""
    result = _number(result)
    return (
        result is not None
        and result.shape == value.shape
        and np.allclose(value, result, rtol=1e-5, atol=0, equal_nan=True)
    )
