"""From the runs of a study to numbers by the number of ranks."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.report.accuracy import is_better_low, metric_in, reached
from keras_dist.report.training import (
    numbers_in,
    phases_of,
    rates_of_epochs,
    seconds_of_phases,
    steps_of_phases,
)
from keras_dist.tools.scale.limits import study_limits
from keras_dist.tools.scale.prediction import Step, predicted
from keras_dist.tools.scale.price import Price

Run = Mapping[str, Any]

# How many accuracies the table of times has.
_NUM_LEVELS = 6


def results_of(
    runs: Sequence[Run],
    *,
    target: float | None = None,
    metric: str | None = None,
    price: Price | None = None,
) -> dict[str, Any]:
    """All that follows from the runs.

    Args:
        runs: The runs of the study, also those that failed.
        target: The value of the metric whose time is asked for.
        metric: The metric in the logs; `None` for the accuracy, or else the loss.
        price: What an hour costs.
    """
    usable = [run for run in runs if run["training"] and run["training"]["epochs"]]
    finished = [run for run in usable if run["state"] == "finished"]
    if metric is None and finished:
        metric = metric_in(list(finished[0]["training"]["epochs"][-1]["logs"]))
    counts = sorted({run["ranks"] for run in finished})
    groups = [[run for run in finished if run["ranks"] == count] for count in counts]
    base = _rate_of_rank(groups[0]) if groups else 0.0
    rows = [_of_ranks(group, base, target, metric, price) for group in groups]
    steps = [Step(**row["step"]) for row in rows if row["step"]]
    return {
        "metric": metric,
        "target": target,
        "by_ranks": rows,
        "time_to": _times_to(groups, metric),
        "prediction": predicted(steps, base),
        "limits": study_limits(rows, metric=metric, target=target),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, lowest and highest of some numbers; `None` of none.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0}
    """
    if not values:
        return None
    median = statistics.median(values)
    return {"median": median, "low": min(values), "high": max(values)}


def efficiencies(rates: Sequence[float], ranks: int, base: float) -> list[float]:
    """Rows per second of one rank, as fractions of those of a rank of the fewest.

    >>> efficiencies([150.0, 180.0], 2, 100.0)
    [0.75, 0.9]
    """
    return [rate / ranks / base for rate in rates]


def _rates(group: Sequence[Run]) -> list[float]:
    """Rows per second of each epoch of each run."""
    return [r for run in group for r in rates_of_epochs(run["training"]["epochs"])]


def _rate_of_rank(group: Sequence[Run]) -> float:
    return statistics.median(_rates(group)) / group[0]["ranks"]


def _of_ranks(
    group: Sequence[Run],
    base: float,
    target: float | None,
    metric: str | None,
    price: Price | None,
) -> dict[str, Any]:
    """The numbers of one number of ranks."""
    ranks, rates = group[0]["ranks"], _rates(group)
    epochs = [epoch for run in group for epoch in run["training"]["epochs"]]
    trainings = [run["training"] for run in group]
    hosts = max(training["hosts"] for training in trainings)
    row = {
        "ranks": ranks,
        "hosts": hosts,
        "runs": len(group),
        "devices": list(dict.fromkeys(trainings[0]["devices"])),
        "rows_per_second": spread(rates),
        "efficiency": spread(efficiencies(rates, ranks, base)),
        "phases": phases_of(epochs),
        "step": _step(epochs, ranks),
        "computing_of_step": _of_step(epochs, "computing"),
        "outside": _outside(epochs),
        "first": max(rank["first"] for epoch in epochs for rank in epoch["ranks"]),
        "memory": _most(epochs, "memory"),
        "gpu_memory": _most(epochs, "gpu_memory"),
        "training_seconds": spread([t["epochs"][-1]["seconds"] for t in trainings]),
        "seconds": spread([run["seconds"] for run in group]),
        "best": _best(trainings, metric),
        "to_target": _to_target(trainings, metric, target),
    }
    return row | {"cost": _cost(group, row, price)}


def _step(epochs: Sequence[Any], ranks: int) -> dict[str, float] | None:
    """The arguments of a `Step`; `None` if no step was timed."""
    steps = steps_of_phases(epochs)
    if not steps:
        return None
    seconds = seconds_of_phases(epochs)
    rows = sum(rank["rows"] for epoch in epochs for rank in epoch["ranks"])
    all_steps = sum(epoch["steps"] * len(epoch["ranks"]) for epoch in epochs)
    averaging = seconds.pop("averaging") / steps
    return {
        "ranks": ranks,
        "rows": ranks * rows / all_steps,
        "averaging": averaging,
        "others": sum(seconds.values()) / steps,
    }


def _of_step(epochs: Sequence[Any], phase: str) -> float | None:
    steps = steps_of_phases(epochs)
    return seconds_of_phases(epochs)[phase] / steps if steps else None


def _outside(epochs: Sequence[Any]) -> float:
    """The fraction of the epochs that is validation and callbacks."""
    total = sum(epoch["epoch_seconds"] for epoch in epochs)
    return 1 - sum(epoch["training_seconds"] for epoch in epochs) / total


def _most(epochs: Sequence[Any], name: str) -> int | None:
    found = [rank[name] for epoch in epochs for rank in epoch["ranks"]]
    return max((value for value in found if value is not None), default=None)


def _best(trainings: Sequence[Any], metric: str | None) -> dict[str, float] | None:
    if metric is None:
        return None
    choose = min if is_better_low(metric) else max
    by_run = [
        [v for v in numbers_in(t["epochs"], metric) if v is not None] for t in trainings
    ]
    return spread([choose(values) for values in by_run if values])


def _to_target(
    trainings: Sequence[Any], metric: str | None, target: float | None
) -> dict[str, Any] | None:
    """Seconds, rows and epochs until the target, of the runs that have reached it."""
    if metric is None or target is None:
        return None
    found = [reached(training["epochs"], metric, target) for training in trainings]
    hits = [epoch for epoch in found if epoch is not None]
    return {
        "reached": len(hits),
        "seconds": spread([epoch["seconds"] for epoch in hits]),
        "rows": spread([epoch["rows"] for epoch in hits]),
        "epochs": spread([epoch["epoch"] for epoch in hits]),
    }


def _cost(
    group: Sequence[Run], row: Mapping[str, Any], price: Price | None
) -> dict[str, float | None] | None:
    """Of a whole run with its start, and of one that ends at the target."""
    if price is None:
        return None
    numbers = {"ranks": row["ranks"], "hosts": row["hosts"]}
    start = statistics.median(
        run["seconds"] - run["training"]["epochs"][-1]["seconds"] for run in group
    )
    hit = (row["to_target"] or {}).get("seconds")
    return {
        "run": price.of(row["seconds"]["median"], **numbers),
        "to_target": price.of(start + hit["median"], **numbers) if hit else None,
    }


def _times_to(groups: Sequence[Sequence[Run]], metric: str | None) -> list[Any]:
    """For some values of the metric, seconds and rows until each number of ranks."""
    if metric is None or not groups:
        return []
    bests = [_best([run["training"] for run in group], metric) for group in groups]
    known = [best["median"] for best in bests if best is not None]
    if not known:
        return []
    rows = []
    for level in levels(known, is_low=is_better_low(metric)):
        for group in groups:
            trainings = [run["training"] for run in group]
            found = _to_target(trainings, metric, level)
            rows.append({"ranks": group[0]["ranks"], "level": level, **(found or {})})
    return rows


def levels(bests: Sequence[float], *, is_low: bool) -> list[float]:
    """Values of a metric whose times are compared, up to the best one of all.

    Args:
        bests: The best value on each number of ranks.
        is_low: Whether a low value is a good one.

    >>> levels([0.93, 0.91], is_low=False)
    [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.91, 0.93]
    >>> levels([0.31], is_low=True)
    [1.0, 0.8, 0.6, 0.5, 0.4, 0.35, 0.31]
    """
    if is_low:
        fixed = [2.0, 1.5, 1.0, 0.8, 0.6, 0.5, 0.4, 0.35, 0.3, 0.2, 0.1, 0.05, 0.01]
        usable = [value for value in fixed if value > max(bests)]
    else:
        fixed = [0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995]
        usable = [value for value in fixed if value < min(bests)]
    return [*usable[-_NUM_LEVELS:], *sorted(set(bests), reverse=is_low)]
