"""Where the time of an epoch went, from the times of all ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Times:
    """What one rank has measured in an epoch.

    Args:
        seconds: Of the whole epoch, without validation.
        input: Of them, waiting for the next batch.
        exchanges: Seconds of each step from this rank's gradients to all ranks'.
    """

    seconds: float
    input: float
    exchanges: Any


@dataclass(frozen=True)
class Breakdown:
    """Shares of the time of all ranks, which add up to 1.

    Args:
        computing: What is left: forward, backward, update, and Python.
        averaging: The collective itself: what it takes the rank that came last.
        waiting: For the rank that came last.
        input: For the next batch.
        slowest: The rank that most often came last, `None` on one rank.
        how_often: The share of steps in which it did.
    """

    computing: float
    averaging: float
    waiting: float
    input: float
    slowest: int | None
    how_often: float

    def __str__(self) -> str:
        words = [f"{self.computing:.0%} computing"]
        if self.slowest is not None:
            last = f"for rank {self.slowest} in {self.how_often:.0%} of the steps"
            words += [
                f"{self.averaging:.0%} averaging",
                f"{self.waiting:.0%} waiting ({last})",
            ]
        return ", ".join([*words, f"{self.input:.0%} input"])


def breakdown(everyone: Sequence[Times]) -> Breakdown:
    """Break down the time of all ranks.

    All ranks leave a collective together, so the one that is in it for the shortest
    time has come last, and what it spends there is the collective itself.

    Args:
        everyone: The times of each rank, in rank order, of the same steps.

    >>> everyone = Times(10.0, 1.0, [3.0, 1.0]), Times(10.0, 1.0, [1.0, 1.0])
    >>> print(breakdown(everyone))
    60% computing, 20% averaging, 10% waiting (for rank 1 in 50% of the steps), ...
    """
    total = sum(times.seconds for times in everyone)
    waited = sum(times.input for times in everyone) / total
    steps = min(len(times.exchanges) for times in everyone)
    exchanges = np.array([times.exchanges[:steps] for times in everyone])
    if len(everyone) == 1 or steps == 0:
        return Breakdown(1 - waited, 0.0, 0.0, waited, None, 0.0)
    shortest = exchanges.min(axis=0)
    averaging = len(everyone) * float(shortest.sum()) / total
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
