"""What limits, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.report.accuracy import is_better_low
from keras_dist.report.limits import LARGE, limits_of
from keras_dist.report.numbers import counted, percent, rounded, seconds

Row = Mapping[str, Any]

# From this factor on, a number has grown.
_GROWN = 1.15

# Steps that compute less than so many seconds are short.
_SHORT = 0.025

# By so much an accuracy is lower, where it is.
_LESS = 0.02

# Below this efficiency there has to be a reason.
_GOOD = 0.9


def study_limits(
    rows: Sequence[Row], *, metric: str | None, target: float | None
) -> list[str]:
    """Sentences on what limits, those of the most ranks last.

    Args:
        rows: The numbers of each number of ranks, the smallest first.
        metric: The metric of the target.
        target: Its value, if one was asked for.
    """
    if not rows:
        return ["No run has finished, so there is nothing to say of the speed."]
    base, words = rows[0], []
    for row in rows:
        words += _of_ranks(row, base)
    if target is None:
        return words + _of_results(rows, metric)
    return words + _of_learning(rows, metric or "the metric", target)


def _of_ranks(row: Row, base: Row) -> list[str]:
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
    """Whether computing a step takes longer than on the fewest ranks, and why."""
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


def _of_results(rows: Sequence[Row], metric: str | None) -> list[str]:
    """Whether more ranks learn less in the same epochs."""
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
                f"{rounded(base)} in the same epochs: the recipe loses with the larger "
                "global batch. See docs/how_to/learning_rate.md."
            )
    return words


def _of_learning(rows: Sequence[Row], metric: str, target: float) -> list[str]:
    """Whether more ranks need more rows for the same target."""
    base = (rows[0]["to_target"] or {}).get("rows")
    words = []
    for row in rows[1:]:
        found = (row["to_target"] or {}).get("rows")
        ranks = counted(row["ranks"], "rank")
        if base is None:
            return []
        if found is None:
            words.append(
                f"On {ranks} {metric} has not reached {target:g}: the recipe breaks "
                "with the larger global batch. See docs/how_to/learning_rate.md."
            )
        elif found["median"] >= _GROWN * base["median"]:
            words.append(
                f"On {ranks} {metric} reaches {target:g} after "
                f"{found['median'] / base['median']:.2f} times as many rows as on "
                f"{counted(rows[0]['ranks'], 'rank')}: the larger global batch costs "
                "that much. A warm-up, or another rate, may help: see "
                "docs/how_to/learning_rate.md."
            )
    return words
