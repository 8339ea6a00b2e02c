"""Predict data that was divided before it was decoded, and gather the predictions."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.data import division_of, stream_of
from keras_dist.training.predict import agree_on_outputs, gathered_outputs


def is_divided_by_row(data: Any) -> bool:
    """Tell whether the predictions of all ranks together are those of all rows."""
    division = division_of(data)
    return division is not None and not division.is_by_file


def predict_divided(
    dataset: Any, predict: Callable[[Any], Any], weights: Callable[[], Sequence[Any]]
) -> Any:
    """Predict all rows, in the order that they had before `shard`.

    Args:
        dataset: This rank's batches.
        predict: Predicts a data set, without a collective.
        weights: Returns the weights that have to be equal on all ranks; called when the
            model is built.

    Raises:
        ValueError: On all ranks, if it is not known which row a prediction is of.
    """
    stream = comm.run_on_all(lambda: stream_of(dataset))
    division = stream.division
    size = division.size

    def outputs_of_rows() -> Any:
        is_empty = stream.length == 0 or not stream.first(1)
        return None if is_empty else predict(dataset)

    outputs = comm.run_on_all(outputs_of_rows)
    counts = comm.gather(None if outputs is None else _num_rows(outputs))
    total = sum(filter(None, counts))
    expected = [division.rows_of(rank, total) for rank in range(size)]
    if division.has_batches or total == 0 or [n or 0 for n in counts] != expected:
        raise ValueError(
            "The predictions of divided data can be gathered only if each row has one, "
            f"in order. Received: {counts} predictions of ranks 0 to {size - 1}, of "
            f"{stream.kind}, divided by {division.by}. Divide it by rows, leave none "
            "out after `shard`, or pass gather=False."
        )
    # The first rank has a row if any has one.
    empty = keras.tree.map_structure(_without_rows, outputs)
    empty = comm.broadcast(empty if comm.rank() == 0 else None)
    outputs = empty if outputs is None else outputs
    agree_on_outputs(outputs, weights())
    if division.by == "rows":
        return gathered_outputs(outputs, total)
    return _in_order(outputs, division, total)


def _in_order(outputs: Any, division: Any, total: int) -> Any:
    """Order rows where each rank has whole batches, and rows of the last one."""
    in_round = division.size * division.batch_size
    full = total // in_round * in_round
    rows = np.arange(total)
    by_rank = [
        np.concatenate(
            [
                rows[:full][rows[:full] // division.batch_size % division.size == rank],
                rows[full:][rank :: division.size],
            ]
        )
        for rank in range(division.size)
    ]
    order = np.argsort(np.concatenate(by_rank))

    def gathered(leaf: Any) -> Any:
        return None if leaf is None else np.concatenate(comm.gather(leaf))[order]

    return keras.tree.map_structure(gathered, outputs)


def _num_rows(outputs: Any) -> int:
    """Rows of the outputs; -1 if they are not arrays of equally many rows."""
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if leaf is not None]
    if not all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
        return -1
    counts = {len(leaf) for leaf in leaves}
    return counts.pop() if len(counts) == 1 else -1


def _without_rows(leaf: Any) -> Any:
    return None if leaf is None else leaf[:0]
