"""More ranks than were measured, by the model of a step that `docs/growth.md` has.

A step takes the time of computing, waiting and input, as on the most ranks that were
measured, and of averaging: L + 2 (N − 1) / N × S / B where a ring of N ranks is limited
by its bandwidth B for S bytes, or L + 2 (N − 1) h where it is limited by the latency h
of each of its hops. Both are fitted to what averaging took, and the truth is expected
between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# The numbers of ranks that are predicted are these times the most that was measured.
_FACTORS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Step:
    """A step, as it was measured on one number of ranks.

    Args:
        ranks: How many ranks.
        rows: Rows of all of them in a step.
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
        """Seconds of averaging on so many ranks."""
        return self.constant + self.factor * _FORMS[self.form](ranks)


_FORMS: dict[str, Callable[[int], float]] = {
    "bandwidth": lambda ranks: 2 * (ranks - 1) / ranks,
    "latency": lambda ranks: 2.0 * (ranks - 1),
}


def fitted(form: str, steps: Sequence[Step]) -> Fitted:
    """The least squares fit of a form, with no negative number.

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
    """Rows per second and efficiency on more ranks, between two forms.

    Args:
        steps: A step on each number of ranks that was measured, the smallest first.
        base_rate_of_rank: Rows per second of one rank, to which efficiency is related.

    Returns:
        The fits, the points and the assumptions in words; `None` where no averaging
        was measured, as on one rank.
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
        "Nothing is said of the accuracy: larger global batches need another recipe.",
    ]
