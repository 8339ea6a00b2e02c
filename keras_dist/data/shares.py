"""Shares: how many rows of each global batch a rank computes, if not as many as all.

With weights by rows the mean over a global batch is exact, whatever the shares are. So
a slow rank may get fewer rows, and the others need not wait for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

# The whole of shares of a batch whose number of rows is not known: fine enough for any.
UNITS = 2**20

# All ranks compute at one pace if the slowest needs at most this much more than all do
# on average: less is noise.
DEAD_BAND = 1.05


@dataclass(frozen=True)
class Shares:
    """Each rank's share of a global batch: consecutive rows, in rank order.

    Args:
        bounds: Where the share of each rank begins and, last, where that of the last
            one ends, which is the whole. A batch of so many rows is divided just so,
            and others in the same proportions.
        is_measured: Whether the bounds change during the training. Then a rank gets
            all rows of a batch, and its step takes those of the bounds of now.
    """

    bounds: tuple[int, ...]
    is_measured: bool = False

    @classmethod
    def of(cls, shares: Any, size: int) -> "Shares | None":
        """Make shares of the argument of `dist_fit`; `None` for equal ones.

        >>> Shares.of([2, 1, 1], size=3).rows(96)
        [48, 24, 24]

        Args:
            shares: `"equal"`, `"measured"`, or a number for each rank.
            size: Number of ranks.

        Raises:
            ValueError: If `shares` is unknown, or has not one positive number for each
                rank.
        """
        if isinstance(shares, str) and shares == "equal":
            return None
        if isinstance(shares, str) and shares == "measured":
            return None if size == 1 else cls.equal(size, UNITS, is_measured=True)
        is_list = isinstance(shares, (Sequence, np.ndarray)) and len(shares) == size
        try:
            numbers = [float(share) for share in shares] if is_list else []
        except (TypeError, ValueError):
            numbers = []
        if not numbers or not all(0 < each < math.inf for each in numbers):
            raise ValueError(
                '`shares` must be "equal", "measured" (by the speed of each rank), or '
                "a list with a positive number for each rank. Received: "
                f"shares={shares!r} and {size} ranks."
            )
        ends = np.cumsum(numbers)
        bounds = np.rint(ends / ends[-1] * UNITS).astype(int).tolist()
        return None if size == 1 else cls((0, *bounds))

    @classmethod
    def equal(cls, size: int, whole: int, *, is_measured: bool = False) -> "Shares":
        """Divide a whole as evenly as possible."""
        bounds = tuple(-(-rank * whole // size) for rank in range(size + 1))
        return cls(bounds, is_measured)

    def of_batch(self, length: int | None) -> "Shares":
        """Begin measured shares of batches of `length` rows; `None`: unknown."""
        if length is None or not self.is_measured:
            return self
        return Shares.equal(self.size, length, is_measured=True)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.bounds) - 1

    def rows(self, length: int) -> list[int]:
        """Return each rank's rows of a batch of `length` rows.

        Each rank has a row, if there are enough.

        >>> Shares((0, 98, 99, 100)).rows(100), Shares((0, 98, 99, 100)).rows(7)
        ([98, 1, 1], [5, 1, 1])
        """
        begins = [first_row(rank, length, self.bounds) for rank in range(self.size)]
        return np.diff([*begins, length]).tolist()

    def in_words(self, length: int | None) -> str:
        """Say in the plan who computes what of a batch; `None`: of unknown length."""
        start = " at first, then by speed" if self.is_measured else ""
        if length is None:
            parts = np.diff(self.bounds) / self.bounds[-1]
            shown = [f"{part:.0%}" for part in parts]
        else:
            shown = [f"{rows:,}" for rows in self.rows(length)]
        if len(set(shown)) == 1:
            text = f"{len(shown)} × {shown[0]}"
        else:
            most = 8
            text = " + ".join([*shown[:most], *["…"] * (len(shown) > most)])
        return text + (" of the rows" if length is None else " rows") + start


def first_row(rank: int, length: Any, bounds: Any) -> Any:
    """Find the first row that a rank computes; of the last rank + 1, the end.

    Each rank has a row if there are as many; else the first ranks have one each.

    Args:
        rank: The rank.
        length: Rows of the batch: a whole number, or a scalar int64 tensor.
        bounds: The bounds of `Shares`, or an int64 tensor of them.

    >>> [first_row(rank, 90, (0, 20, 60, 60)) for rank in range(4)]
    [0, 30, 89, 90]
    """
    is_graph = tf.is_tensor(length) or tf.is_tensor(bounds)
    least, most, largest = (
        (tf.minimum, tf.maximum, tf.reduce_max) if is_graph else (min, max, np.max)
    )
    if is_graph:
        bounds, length = (tf.cast(each, tf.int64) for each in (bounds, length))
    else:
        bounds = np.asarray(bounds, np.int64)
    size = bounds.shape[0] - 1
    whole = bounds[size]
    # Rounded; and with a row for each rank before.
    wanted = (2 * bounds * length + whole) // (2 * whole) - np.arange(size + 1)
    spare = most(length - size, 0)
    row = rank + least(most(largest(wanted[: rank + 1]), 0), spare)
    return least(row, length) if is_graph else int(least(row, length))


def adjusted(
    bounds: Sequence[int], seconds: Sequence[float], *, quantum: int = 1
) -> tuple[int, ...]:
    """Give each rank rows in proportion to the rows per second that it has computed.

    This is the rule of LB-BSP (Chen et al., arXiv 1806.02508) with a dead band: nothing
    changes while the slowest rank needs hardly more time than the mean of all.

    Args:
        bounds: The bounds of `Shares`.
        seconds: Seconds that each rank has computed in a step.
        quantum: The multiple of the whole in which bounds move.

    Returns:
        Other bounds, or the same; a function of the arguments alone.

    >>> adjusted((0, 48, 96), [1.0, 2.0])
    (0, 64, 96)
    >>> adjusted((0, 64, 96), [1.01, 0.98])
    (0, 64, 96)
    """
    times = np.asarray(seconds, np.float64)
    if not np.all(np.isfinite(times)) or times.min() <= 0:
        return tuple(bounds)
    if times.max() <= DEAD_BAND * times.mean():
        return tuple(bounds)
    size, whole = len(bounds) - 1, bounds[-1]
    speeds = np.diff(bounds) / times
    ends = np.cumsum(speeds) / speeds.sum() * whole
    # A rank keeps a row, or a quantum of them.
    step = quantum if whole >= size * quantum else 1
    inner = (np.rint(ends[:-1] / step) * step).astype(int)
    found = [0]
    for rank, bound in enumerate(inner):
        most = whole - (size - 1 - rank) * step
        found.append(int(min(max(bound, found[-1] + step), most)))
    return (*found, whole)
