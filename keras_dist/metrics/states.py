"""Sum, average or take the states of all ranks, by one collective."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.metrics.rank_report import Seen
from keras_dist.metrics.stateful import rule_of


def of_all_ranks(
    variables: Sequence[Any], states: Sequence[np.ndarray], everyone: Sequence[Seen]
) -> list[np.ndarray]:
    """What each variable holds when the states of all ranks have come together.

    Args:
        variables: Of metrics, the same ones on every rank.
        states: This rank's values of them.
        everyone: What the metrics of each rank have seen.
    """
    fractions = weights(everyone)
    is_first = [fraction > 0 for fraction in fractions].index(True) == comm.rank()
    fraction = fractions[comm.rank()]
    has_rows = everyone[comm.rank()].has_rows
    factors = {"sum": has_rows, "first": is_first, "mean": fraction}
    sent, counts = [], []
    for variable, state in zip(variables, states, strict=True):
        words = _words(state, factors[rule_of(variable)])
        sent += words
        counts.append(len(words))
    received = iter(
        comm.sum_tensors(
            [tf.constant(word) for word in sent],
            name="keras_dist.metrics",
            dtype=tf.float64,
        )
    )
    return [_value([next(received).numpy() for _ in range(count)]) for count in counts]


def weights(everyone: Sequence[Seen]) -> list[float]:
    """Each rank's part of all rows that the metrics have seen; they add up to 1."""
    rows = [seen.rows * seen.has_rows for seen in everyone]
    # Where nobody has counted, all ranks that count are alike.
    rows = rows if any(rows) else [int(seen.has_rows) for seen in everyone]
    return [own / sum(rows) for own in rows]


def average(results: Sequence[Any], everyone: Sequence[Seen]) -> Any:
    """Mean of results of one structure, by the rows of each rank; in float64."""
    fractions = weights(everyone)

    def mean(*values: Any) -> Any:
        pairs = zip(values, fractions, strict=True)
        return sum(
            np.multiply(value, fraction) for value, fraction in pairs if fraction
        )

    return keras.tree.map_structure(mean, *results)


def _words(state: np.ndarray, factor: float) -> list[np.ndarray]:
    """A state × its factor, as float64 numbers that can be summed without loss."""
    is_whole = state.dtype.kind in "iub" and isinstance(factor, bool)
    if not is_whole:
        # Not by multiplication: what must not count may be infinite.
        state = state.astype(np.float64)
        return [state * factor if factor else np.zeros_like(state)]
    # A float64 has 53 bits: half a number each leaves room for the sum.
    whole = state.astype(np.int64) * int(factor)
    return [(whole >> 32).astype(np.float64), (whole & 0xFFFFFFFF).astype(np.float64)]


def _value(words: list[np.ndarray]) -> np.ndarray:
    if len(words) == 1:
        return words[0]
    high, low = (word.astype(np.int64) for word in words)
    return (high << 32) + low
