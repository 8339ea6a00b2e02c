"""Synchronize the state of metrics: sum, average or copy it, by one allreduce."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.training.metrics.rank_report import Seen
from keras_dist.training.metrics.stateful import rule_of


def synchronized(
    variables: Sequence[Any], states: Sequence[np.ndarray], seen: Sequence[Seen]
) -> list[np.ndarray]:
    """The values of metric variables over all ranks, each by its own rule.

    One allreduce sums all of them: each rank sends its state × 1 or 0 where the rule is
    "sum" or "first", and × its fraction of all rows where the rule is "mean".

    Args:
        variables: Variables of metrics, the same on every rank.
        states: This rank's values of the variables.
        seen: How much data the metrics of each rank have been updated with, in rank
            order.

    Returns:
        The synchronized value of each variable: int64 for integers that are not
        averaged, else float64.
    """
    fractions = weights(seen)
    is_first = [fraction > 0 for fraction in fractions].index(True) == comm.rank()
    fraction = fractions[comm.rank()]
    has_rows = seen[comm.rank()].has_rows
    factors = {"sum": has_rows, "first": is_first, "mean": fraction}
    sent, counts = [], []
    for variable, state in zip(variables, states, strict=True):
        encoded = _encoded(state, factors[rule_of(variable)])
        sent += encoded
        counts.append(len(encoded))
    received = iter(
        comm.sum_tensors(
            [tf.constant(array) for array in sent],
            name="keras_dist.metrics",
            dtype=tf.float64,
        )
    )
    return [
        _decoded([next(received).numpy() for _ in range(count)]) for count in counts
    ]


def weights(seen: Sequence[Seen]) -> list[float]:
    """Each rank's fraction of all rows that the metrics have seen; their sum is 1."""
    rows = [of_rank.rows * of_rank.has_rows for of_rank in seen]
    # If no rank has counted its rows, those that have rows get equal fractions.
    rows = rows if any(rows) else [int(of_rank.has_rows) for of_rank in seen]
    return [of_rank / sum(rows) for of_rank in rows]


def average(results: Sequence[Any], seen: Sequence[Seen]) -> Any:
    """Average of the ranks' results, weighted by their rows, in float64.

    Args:
        results: Of each rank, all of the same structure.
        seen: How much data the metrics of each of these ranks have been updated with.
    """
    fractions = weights(seen)

    def mean(*values: Any) -> Any:
        pairs = zip(values, fractions, strict=True)
        return sum(
            np.multiply(value, fraction) for value, fraction in pairs if fraction
        )

    return keras.tree.map_structure(mean, *results)


def _encoded(state: np.ndarray, factor: float) -> list[np.ndarray]:
    """`state` × `factor` as float64 arrays whose sum over the ranks is exact.

    A float64 has 53 bits. So an int64 is sent as two arrays of 32 bits each, which
    leaves 21 bits for the sum over the ranks.
    """
    is_whole = state.dtype.kind in "iub" and isinstance(factor, bool)
    if not is_whole:
        # A state that is not counted may be infinite, and infinity × 0 is NaN.
        state = state.astype(np.float64)
        return [state * factor if factor else np.zeros_like(state)]
    whole = state.astype(np.int64) * int(factor)
    return [(whole >> 32).astype(np.float64), (whole & 0xFFFFFFFF).astype(np.float64)]


def _decoded(encoded: list[np.ndarray]) -> np.ndarray:
    if len(encoded) == 1:
        return encoded[0]
    high, low = (half.astype(np.int64) for half in encoded)
    return (high << 32) + low
