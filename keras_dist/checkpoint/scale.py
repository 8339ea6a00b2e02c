"""What changed since a checkpoint where a training is resumed at another scale."""

from collections.abc import Mapping
from typing import Any

from keras_dist.report.plan import Plan


def scale_of(plan: Plan) -> dict[str, Any]:
    """What depends on the number of ranks: the names are those of the file format.

    Args:
        plan: The plan of a fit.

    Returns:
        `ranks`; `batch`, the rows of a global batch, or `None` where the data decides
        it; `rates`, the scaled learning rate of each optimizer, as the plan shows it.
    """
    batch = plan.training.batch_size
    return {
        "ranks": plan.size,
        "batch": None if batch is None else batch * plan.size,
        "rates": [rate.after for rate in plan.rates],
    }


def changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """What is another than before, for the plan; "" if nothing is known to be.

    >>> before = {"ranks": 3, "batch": 96, "rates": ["0.003"]}
    >>> changes(before, {"ranks": 2, "batch": 64, "rates": ["0.002"]})
    'ranks 3 → 2, global batch 96 → 64, learning rate 0.003 → 0.002'
    >>> changes(before, {"ranks": 2, "batch": 96, "rates": ["0.003"]})
    'ranks 3 → 2'

    Args:
        before: Of the checkpoint; `None` if it was written by an earlier version.
        now: Of this fit.
    """
    if not before:
        return ""
    pairs = [(name, before.get(name), now[name]) for name in ("ranks", "batch")]
    rates = [(before.get("rates") or []), now["rates"]]
    if len(rates[0]) == len(rates[1]):
        pairs += [("rates", *pair) for pair in dict.fromkeys(zip(*rates, strict=True))]
    words = {"batch": "global batch", "rates": "learning rate"}
    return ", ".join(
        f"{words.get(name, name)} {_text(old)} → {_text(new)}"
        for name, old, new in pairs
        if old is not None and new is not None and old != new
    )


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
