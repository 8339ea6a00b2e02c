"""Divide the time of an epoch into computing, averaging, waiting and input."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Times:
    """Times that one rank has measured in an epoch.

    Args:
        seconds: Seconds of the epoch, without validation.
        input: Seconds of them in which the rank waited for the next batch.
        exchanges: Seconds of each step in the collective that averages gradients.
        first: Seconds of them until the second step had its data, if a step was traced:
            what does not come again in later epochs.
    """

    seconds: float
    input: float
    exchanges: Any
    first: float = 0.0


@dataclass(frozen=True)
class Measured:
    """What one rank has measured in an epoch.

    Args:
        rows: Rows that it has trained on.
        seconds: Seconds of the epoch, without validation.
        times: How they are divided; `None` if that was not measured.
    """

    rows: int
    seconds: float
    times: Times | None = None


@dataclass(frozen=True)
class RankTimes:
    """Seconds of an epoch on one rank, which add up to those of the epoch.

    Args:
        computing, averaging, waiting, input: As in `Breakdown`, in seconds.
        last_fraction: The fraction of steps in which this rank arrived last.
    """

    computing: float
    averaging: float
    waiting: float
    input: float
    last_fraction: float


@dataclass(frozen=True)
class Breakdown:
    """Fractions of the total time of all ranks, which add up to 1.

    Args:
        computing: The rest: forward pass, backward pass, update, and Python.
        averaging: The collective itself, as long as it takes the last rank to arrive.
        waiting: In the collective, for the last rank to arrive.
        input: Waiting for the next batch.
        slowest: The rank that most often arrived last; `None` on one rank.
        slowest_fraction: The fraction of steps in which it arrived last.
    """

    computing: float
    averaging: float
    waiting: float
    input: float
    slowest: int | None
    slowest_fraction: float

    def __str__(self) -> str:
        words = [f"{self.computing:.0%} computing"]
        if self.slowest is not None:
            steps = f"{self.slowest_fraction:.0%} of the steps"
            words += [
                f"{self.averaging:.0%} averaging",
                f"{self.waiting:.0%} waiting (for rank {self.slowest} in {steps})",
            ]
        return ", ".join([*words, f"{self.input:.0%} input"])


def breakdown(ranks: Sequence[Times]) -> Breakdown:
    """Divide the total time of all ranks into parts.

    All ranks leave a collective at the same moment. The rank with the shortest time in
    it has therefore arrived last, and its time is that of the collective itself.

    Args:
        ranks: The times of each rank, in rank order, of the same steps.

    >>> ranks = Times(10.0, 1.0, [3.0, 1.0]), Times(10.0, 1.0, [1.0, 1.0])
    >>> print(breakdown(ranks))
    60% computing, 20% averaging, 10% waiting (for rank 1 in 50% of the steps), ...
    """
    total = sum(times.seconds for times in ranks)
    waited = sum(times.input for times in ranks) / total
    steps = min(len(times.exchanges) for times in ranks)
    exchanges = np.array([times.exchanges[:steps] for times in ranks])
    if len(ranks) == 1 or steps == 0:
        return Breakdown(1 - waited, 0.0, 0.0, waited, None, 0.0)
    shortest = exchanges.min(axis=0)
    averaging = len(ranks) * float(shortest.sum()) / total
    waiting = float((exchanges - shortest).sum()) / total
    ((slowest, count),) = Counter(exchanges.argmin(axis=0).tolist()).most_common(1)
    return Breakdown(
        1 - averaging - waiting - waited,
        averaging,
        waiting,
        waited,
        slowest,
        count / steps,
    )


def times_by_rank(ranks: Sequence[Times]) -> list[RankTimes]:
    """Divide the time of each rank into parts, whose sum is that of `breakdown`.

    Args:
        ranks: The times of each rank, in rank order, of the same steps.

    >>> ranks = Times(10.0, 1.0, [3.0, 1.0]), Times(10.0, 1.0, [1.0, 1.0])
    >>> [each.waiting for each in times_by_rank(ranks)]
    [2.0, 0.0]
    """
    steps = min(len(times.exchanges) for times in ranks)
    if len(ranks) == 1 or steps == 0:
        return [RankTimes(t.seconds - t.input, 0.0, 0.0, t.input, 0.0) for t in ranks]
    exchanges = np.array([times.exchanges[:steps] for times in ranks])
    shortest = exchanges.min(axis=0)
    averaging = float(shortest.sum())
    waits = (exchanges - shortest).sum(axis=1)
    last = np.bincount(exchanges.argmin(axis=0), minlength=len(ranks)) / steps
    return [
        RankTimes(
            times.seconds - averaging - float(wait) - times.input,
            averaging,
            float(wait),
            times.input,
            float(fraction),
        )
        for times, wait, fraction in zip(ranks, waits, last, strict=True)
    ]
