"""From the runs of a study to numbers by ranks, what limits them, and a prediction."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist.report.training import (
    LARGE,
    counted,
    is_better_low,
    limits_of,
    metric_in,
    numbers_in,
    percent,
    phases_of,
    rates_of_epochs,
    reached,
    rounded,
    seconds,
    seconds_of_phases,
    steps_of_phases,
)

Run = Mapping[str, Any]
Row = Mapping[str, Any]

# How many accuracies the table of times has.
_NUM_LEVELS = 6

# A number has grown from this factor on.
_GROWN = 1.15

# Steps that compute less than so many seconds are short.
_SHORT = 0.025

# An accuracy is lower from this difference on.
_LESS = 0.02

# From this efficiency on, no reason is needed.
_GOOD = 0.9

_FORM = re.compile(
    r"(?P<before>[^\d.\s]*)\s*(?P<amount>\d*\.?\d+)\s*(?P<after>[^\d./\s]*)"
    r"/\s*(?:hour|h)(?:/(?P<unit>rank|gpu|host))?"
)

# The numbers of ranks that are predicted are these times the most that was measured.
_FACTORS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Price:
    """A price by time.

    Args:
        amount: Price of an hour.
        currency: The currency as given: "$", "EUR", or "".
        is_of_host: Whether this is the price of a host, not of a rank.
    """

    amount: float
    currency: str = ""
    is_of_host: bool = False

    def of(self, seconds: float, *, ranks: int, hosts: int) -> float:
        """Return the cost of so many seconds on all ranks."""
        return self.amount * (hosts if self.is_of_host else ranks) * seconds / 3600

    def __str__(self) -> str:
        unit = "host" if self.is_of_host else "rank"
        return f"{self.currency}{self.amount:g}/hour for each {unit}"


def price_of(text: str) -> Price:
    """Parse a price from the command line.

    >>> str(price_of("2.5/hour")), str(price_of("$10/hour/host"))
    ('2.5/hour for each rank', '$10/hour for each host')

    Raises:
        ValueError: If it has another form.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            "A price is that of an hour of a rank, as in 2.5/hour or $2.5/hour, or of "
            f"a host, as in 10/hour/host. Received: --price {text}"
        )
    currency = found["before"] or found["after"]
    return Price(float(found["amount"]), currency, found["unit"] == "host")


def results_of(
    runs: Sequence[Run],
    *,
    target: float | None = None,
    metric: str | None = None,
    price: Price | None = None,
) -> dict[str, Any]:
    """Compute everything that follows from the runs.

    Args:
        runs: The runs of the study, including failed ones.
        target: The value of the metric whose time is compared.
        metric: The metric in the logs; `None` for the accuracy, or else the loss.
        price: Price of an hour.
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
    """Return median, lowest and highest of some numbers; `None` of none.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0}
    """
    if not values:
        return None
    median = statistics.median(values)
    return {"median": median, "low": min(values), "high": max(values)}


def efficiencies(rates: Sequence[float], ranks: int, base: float) -> list[float]:
    """Return rows per second of a rank, relative to a rank of the fewest ranks.

    >>> efficiencies([150.0, 180.0], 2, 100.0)
    [0.75, 0.9]
    """
    return [rate / ranks / base for rate in rates]


def _rates(group: Sequence[Run]) -> list[float]:
    """Return rows per second of each epoch of each run."""
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
    """Return the row of one number of ranks."""
    ranks, rates = group[0]["ranks"], _rates(group)
    epochs = [epoch for run in group for epoch in run["training"]["epochs"]]
    trainings = [run["training"] for run in group]
    hosts = max(training["hosts"] for training in trainings)
    row = {
        "ranks": ranks,
        "hosts": hosts,
        "runs": len(group),
        "devices": list(dict.fromkeys(trainings[0]["devices"])),
        "is_shared": all(training.get("is_shared") for training in trainings),
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
    """Return the arguments of a `Step`; `None` if no step was timed."""
    steps = steps_of_phases(epochs)
    if not steps:
        return None
    by_phase = seconds_of_phases(epochs)
    rows = sum(rank["rows"] for epoch in epochs for rank in epoch["ranks"])
    all_steps = sum(epoch["steps"] * len(epoch["ranks"]) for epoch in epochs)
    averaging = by_phase.pop("averaging") / steps
    return {
        "ranks": ranks,
        "rows": ranks * rows / all_steps,
        "averaging": averaging,
        "others": sum(by_phase.values()) / steps,
    }


def _of_step(epochs: Sequence[Any], phase: str) -> float | None:
    steps = steps_of_phases(epochs)
    return seconds_of_phases(epochs)[phase] / steps if steps else None


def _outside(epochs: Sequence[Any]) -> float:
    """Return the fraction of the epochs spent on validation and callbacks."""
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
    """Return seconds, rows and epochs to the target, of the runs that reached it."""
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
    """Return the cost of a run with its start, and of one that ends at the target."""
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
    """Return seconds and rows to some values of the metric, by number of ranks."""
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
    """Choose values of a metric whose times are compared, up to the best one.

    Args:
        bests: The best value on each number of ranks.
        is_low: Whether a low value is good.

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


def study_limits(
    rows: Sequence[Row], *, metric: str | None, target: float | None
) -> list[str]:
    """Return sentences on what limits the speed, by number of ranks.

    Args:
        rows: The numbers of each number of ranks, the smallest first.
        metric: The metric of the target.
        target: The target, if one was given.
    """
    if not rows:
        return ["No run has finished, so there is nothing to say of the speed."]
    base, words = rows[0], []
    for row in rows:
        words += _limits_of_row(row, base)
    if target is None:
        return words + _learning_less(rows, metric)
    return words + _learning_slower(rows, metric or "the metric", target)


def _limits_of_row(row: Row, base: Row) -> list[str]:
    ranks, efficiency = counted(row["ranks"], "rank"), row["efficiency"]["median"]
    found = []
    if row is not base:
        factor = efficiency * row["ranks"] / base["ranks"]
        found.append(
            f"On {ranks}: {factor:.2f} times the rows per second of "
            f"{counted(base['ranks'], 'rank')}, an efficiency of {percent(efficiency)}."
        )
    reasons = [*_computing(row, base), *limits_of(row["phases"])]
    if row["outside"] >= LARGE:
        reasons.append(
            f"validation and callbacks: {percent(row['outside'])} of the epochs, which "
            "is not in the rows per second."
        )
    start = row["seconds"]["median"] - row["training_seconds"]["median"]
    if start > row["training_seconds"]["median"]:
        reasons.append(
            f"start: imports, data and connecting take {seconds(start)} of each run of "
            f"{seconds(row['seconds']['median'])}; longer trainings hide it."
        )
    if not reasons and row is not base and efficiency >= _GOOD:
        reasons.append("nothing: no phase takes more than a tenth of the time.")
    begin = "" if found else f"On {ranks}: "
    return [*found, *(f"- {begin}{reason}" for reason in reasons)]


def _computing(row: Row, base: Row) -> list[str]:
    """Tell whether computing a step takes longer than on the fewest ranks, and why."""
    now, before = row["computing_of_step"], base["computing_of_step"]
    if row is base or not now or not before or now < _GROWN * before:
        return []
    text = (
        f"computing: {now / before:.2f} times as long for a step as on "
        f"{counted(base['ranks'], 'rank')}. The ranks of a host have its cores and "
        "the bandwidth of its memory in common."
    )
    if before < _SHORT:
        text += (
            f" A step computes {1000 * before:.1f} ms there, so short that what many "
            "ranks add to each step counts: larger batches make it less."
        )
    devices = [", ".join(each["devices"]) for each in (base, row)]
    if devices[0] != devices[1]:
        text += (
            f" A rank was on “{devices[0]}”, and is now on “{devices[1]}”: to compare "
            "ranks with the same cores, set TF_NUM_INTRAOP_THREADS for all runs."
        )
    return [text]


def _learning_less(rows: Sequence[Row], metric: str | None) -> list[str]:
    """Tell whether more ranks learn less in the same epochs."""
    if metric is None or rows[0]["best"] is None:
        return []
    base, words = rows[0]["best"]["median"], []
    for row in rows[1:]:
        found = row["best"]["median"] if row["best"] is not None else None
        if found is None:
            continue
        is_low = is_better_low(metric)
        is_worse = found > _GROWN * base if is_low else found < base - _LESS
        if is_worse:
            words.append(
                f"On {counted(row['ranks'], 'rank')} {metric} comes to "
                f"{rounded(found)}, and on {counted(rows[0]['ranks'], 'rank')} to "
                f"{rounded(base)} in the same epochs: {_reason(row, 'loses with')}"
            )
    return words


def _learning_slower(rows: Sequence[Row], metric: str, target: float) -> list[str]:
    """Tell whether more ranks need more rows for the same target."""
    base = (rows[0]["to_target"] or {}).get("rows")
    words = []
    for row in rows[1:]:
        found = (row["to_target"] or {}).get("rows")
        ranks = counted(row["ranks"], "rank")
        if base is None:
            return []
        if found is None:
            words.append(
                f"On {ranks} {metric} has not reached {target:g}: "
                + _reason(row, "breaks with")
            )
        elif found["median"] >= _GROWN * base["median"]:
            words.append(
                f"On {ranks} {metric} reaches {target:g} after "
                f"{found['median'] / base['median']:.2f} times as many rows as on "
                f"{counted(rows[0]['ranks'], 'rank')}: {_reason(row, 'loses with')}"
            )
    return words


def _reason(row: Row, verb: str) -> str:
    """Name the reason why more ranks learn less."""
    if row.get("is_shared"):
        return (
            "the batch is the same. What may differ is the start and the order of "
            "the rows, if the script sets no seed, and what depends on a rank's own "
            "rows, as BatchNormalization and dropout; repeat the runs to see how much."
        )
    return (
        f"the recipe {verb} the larger global batch. A warm-up, another rate, or "
        'batch="global" may help: see docs/how_to/learning_rate.md.'
    )


@dataclass(frozen=True)
class Step:
    """A step, measured on one number of ranks.

    Args:
        ranks: Number of ranks.
        rows: Rows of all ranks in a step.
        averaging: Seconds of averaging.
        others: Seconds of computing, waiting and input.
    """

    ranks: int
    rows: float
    averaging: float
    others: float


@dataclass(frozen=True)
class Fitted:
    """Seconds of averaging: `constant` + `factor` × form(N).

    Args:
        form: "bandwidth" or "latency".
        constant: L, in seconds.
        factor: S / B, or h, in seconds.
    """

    form: str
    constant: float
    factor: float

    def seconds(self, ranks: int) -> float:
        """Return seconds of averaging on so many ranks."""
        return self.constant + self.factor * _FORMS[self.form](ranks)


_FORMS: dict[str, Callable[[int], float]] = {
    "bandwidth": lambda ranks: 2 * (ranks - 1) / ranks,
    "latency": lambda ranks: 2.0 * (ranks - 1),
}


def fitted(form: str, steps: Sequence[Step]) -> Fitted:
    """Fit a form by least squares, with no negative number.

    With one number of ranks, the constant is 0.

    >>> steps = [Step(2, 64, 3.0, 9.0), Step(4, 128, 4.0, 9.0)]
    >>> fitted("bandwidth", steps), fitted("latency", steps[:1])
    (Fitted(form='bandwidth', constant=1.0, factor=2.0), ...
    >>> fitted("latency", steps[:1]).seconds(3)
    6.0
    """
    pairs = [(_FORMS[form](step.ranks), step.averaging) for step in steps]
    mean_x = sum(x for x, _ in pairs) / len(pairs)
    mean_y = sum(y for _, y in pairs) / len(pairs)
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    if spread:
        slope = sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread
        constant = mean_y - slope * mean_x
        if slope < 0:
            return Fitted(form, mean_y, 0.0)
        if constant >= 0:
            return Fitted(form, constant, slope)
    slope = sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)
    return Fitted(form, 0.0, slope)


def predicted(steps: Sequence[Step], base_rate_of_rank: float) -> dict[str, Any] | None:
    """Predict rows per second and efficiency on more ranks, between two forms.

    `docs/growth.md` has this model of a step. A step takes the time of computing,
    waiting and input, as on the most ranks that were measured, and of averaging: L +
    2 (N − 1) / N × S / B where a ring of N ranks is limited by its bandwidth B for S
    bytes, or L + 2 (N − 1) h where it is limited by the latency h of each of its hops.
    Both are fitted to the measured time of averaging; the truth is expected between
    them.

    Args:
        steps: A step on each number of ranks that was measured, the smallest first.
        base_rate_of_rank: Rows per second of one rank, the reference of efficiency.

    Returns:
        The fits, the points and the assumptions in words; `None` if no averaging was
        measured, as on one rank.
    """
    several = [step for step in steps if step.ranks > 1]
    if not several or not base_rate_of_rank:
        return None
    most = several[-1]
    fits = [fitted(form, several) for form in _FORMS]
    points = []
    for factor in _FACTORS:
        ranks = factor * most.ranks
        rates = sorted(
            ranks * (most.rows / most.ranks) / (most.others + fit.seconds(ranks))
            for fit in fits
        )
        efficiencies = [rate / ranks / base_rate_of_rank for rate in rates]
        points.append(
            {
                "ranks": ranks,
                "rows_per_second": {"low": rates[0], "high": rates[-1]},
                "efficiency": {"low": efficiencies[0], "high": efficiencies[-1]},
            }
        )
    return {
        "fits": [vars(fit) for fit in fits],
        "points": points,
        "assumptions": _assumptions(several, fits),
    }


def _assumptions(several: Sequence[Step], fits: Sequence[Fitted]) -> list[str]:
    most = several[-1]
    counts = ", ".join(str(step.ranks) for step in several)
    by_bandwidth, by_latency = fits
    return [
        f"Each further rank has what each of the {most.ranks} had: the same device or "
        f"cores, the same input, and a batch of {most.rows / most.ranks:,.0f} rows. So "
        f"computing, waiting and input take {most.others * 1000:.1f} ms of a step.",
        f"Averaging is fitted to what it took on {counts} ranks, in two forms: limited "
        f"by bandwidth, {by_bandwidth.constant * 1000:.2f} ms + "
        f"{by_bandwidth.factor * 1000:.2f} ms × 2 (N − 1) / N, which gives the upper "
        f"line; and by the latency of each hop of a ring, "
        f"{by_latency.constant * 1000:.2f} ms + {by_latency.factor * 1000:.2f} ms × "
        "2 (N − 1), which gives the lower one.",
        "The link between further ranks is the one between these. A network between "
        "hosts is slower than the memory of one host: measure two hosts, by -H.",
        "Stragglers cost as much as here. They cost more with each rank.",
        "Nothing is said of the accuracy: larger global batches need another recipe; "
        'with batch="global" the batch, and the model, stay the same.',
    ]
