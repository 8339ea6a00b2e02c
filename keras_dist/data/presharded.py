"""Data sets that are divided among the ranks before their rows are decoded.

What `keras_dist.shard` has divided is known by the data set that it returned. A later
`map`, `batch` or `prefetch` makes a new one, which is followed back to its inputs.
"""

import math
import weakref
from dataclasses import dataclass

import tensorflow as tf

from keras_dist.data.batch_rows import own_span
from keras_dist.data.pipeline import assert_length, count_batches, inputs_of, select


@dataclass(frozen=True, eq=False)
class Presharded:
    """Division of a data set before its rows were decoded: a part of each global batch.

    Args:
        batch_size: Rows of one rank's batch; `None` if unknown: rank r of N then has
            rows r, r + N, ….
        source: The data set before it was divided, the same on all ranks.
        batch: For whose batches it was divided, as in `dist_fit`.
    """

    batch_size: int | None
    source: tf.data.Dataset
    batch: str = "rank"

    @property
    def length(self) -> float | None:
        """Rows of all ranks, `math.inf`, or `None` if unknown."""
        return count_batches(self.source)

    def facts(self) -> tuple[object, ...]:
        """Return what has to be equal on all ranks."""
        return self.batch_size, self.batch, self.length


# How each data set was divided that `divide_rows` has returned.
_KNOWN: "weakref.WeakKeyDictionary[tf.data.Dataset, Presharded]"
_KNOWN = weakref.WeakKeyDictionary()


def divide_rows(presharded: Presharded, rank: int, size: int) -> tf.data.Dataset:
    """Return the rows of one rank, which `find_presharded` recognizes after a `map`.

    >>> rows = tf.data.Dataset.range(7)
    >>> own = [divide_rows(Presharded(2, rows), rank, 2) for rank in (0, 1)]
    >>> [[int(row) for row in data] for data in own]
    [[0, 1, 4, 5], [2, 3, 6]]
    """
    source, length = presharded.source, presharded.length
    each = presharded.batch_size or 1
    full, total = each * size, tf.int64.max
    if length not in (None, math.inf):
        total = int(length or 0)

    def is_own(number: tf.Tensor) -> tf.Tensor:
        place = number % full
        left = total - number + place  # with the first row of its global batch
        begin, end = own_span(tf.where(left < full, left, full), rank, size)
        return (begin <= place) & (place < end)

    dataset = select(source, is_own)
    if length == math.inf:
        dataset = assert_length(dataset, tf.data.INFINITE_CARDINALITY)
    elif length is not None:
        begin, end = own_span(total % full, rank, size)
        dataset = assert_length(dataset, total // full * each + end - begin)
    _KNOWN[dataset] = presharded
    return dataset


def find_presharded(data: object) -> Presharded | None:
    """Find how `data`, or what it was made of, was divided; `None` if it was not.

    Raises:
        ValueError: If it was made of several data sets that were divided differently.
    """
    if not isinstance(data, tf.data.Dataset):
        return None
    if data in _KNOWN:
        return _KNOWN[data]
    found = [find_presharded(input_data) for input_data in inputs_of(data)]
    if len({one and one.facts() for one in found}) > 1:
        kinds = ", ".join("none" if one is None else "by row" for one in found)
        raise ValueError(
            "A data set is made of several others that `keras_dist.shard` has not "
            f"divided alike. Received: divisions {kinds} in a {type(data).__name__}. "
            "Apply `shard` once, to the data set that is made of them."
        )
    return found[0] if found else None
