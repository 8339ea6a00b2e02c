"""Predict a shard of the rows on each rank, and gather the predictions."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.data.arrays import Arrays, as_arrays, shard_validation
from keras_dist.training.same_values import agree_on_arrays

_ADVICE = "Give every rank the same model, weights, data and arguments."

# Predictions are gathered in pieces; this is the largest piece of one rank.
_MESSAGE_BYTES = 64 * 2**20


def rows_to_predict(x: Any, *, batch_size: int | None, steps: int | None) -> Arrays:
    """Return the rows that one process would predict.

    Args:
        x: Array-like of shape `(rows, …)`, or a list, tuple or dict of them.
        batch_size: Rows of a batch.
        steps: Batches of one process, or `None` for all.

    Raises:
        ValueError: If there is no row.
    """
    arrays = as_arrays(x)
    if arrays.num_rows == 0:
        raise ValueError(
            "There is nothing to predict. Received: arrays of 0 rows. Pass at least "
            "one row."
        )
    if steps is None:
        return arrays
    # Keras's own default: as many rows a batch as the steps need.
    global_batch_size = batch_size or math.ceil(arrays.num_rows / steps)
    return arrays[slice(0, steps * global_batch_size)]


def predict_sharded(
    arrays: Arrays,
    predict: Callable[[Any], Any],
    weights: Callable[[], Sequence[Any]],
    *,
    gather: bool,
) -> Any:
    """Predict all rows; each rank predicts its shard of them.

    Args:
        arrays: All rows; every rank holds them.
        predict: Predicts arrays of rows, without a collective.
        weights: Returns the weights that have to be equal on all ranks; called when the
            model is built.
        gather: `False` to return only the predictions of rows `[rank::size]`.

    Raises:
        ValueError: On all ranks, if rows or weights differ between the ranks, or if
            there is not one output for each row.
    """
    rank, size = comm.rank(), comm.size()
    comm.agree(
        {
            "the number of rows": arrays.num_rows,
            "the shapes of the rows": arrays.row_shapes(),
            "`gather`": gather,
        },
        advice=_ADVICE,
    )
    agree_on_arrays({"x": arrays.x})
    own = shard_validation(arrays, rank=rank, size=size)
    # A rank without a row predicts one of another rank, to know the shape of outputs.
    has_rows = rank < arrays.num_rows

    def outputs_of_rows() -> Any:
        outputs = predict(own.x)
        for leaf in keras.tree.flatten(outputs):
            _check_rows(leaf, own.num_rows)
        return keras.tree.map_structure(
            lambda leaf: leaf if has_rows or leaf is None else leaf[:0], outputs
        )

    outputs = comm.run_on_all(outputs_of_rows)
    agree_on_outputs(outputs, weights())
    return gathered_outputs(outputs, arrays.num_rows) if gather else outputs


def agree_on_outputs(outputs: Any, weights: Sequence[Any]) -> None:
    """Raise an error on all ranks if their weights, or kinds of outputs, differ."""
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if leaf is not None]
    kinds = [(leaf.shape[1:], str(leaf.dtype)) for leaf in leaves]
    comm.agree(
        {"the weights": _checksum(weights), "the shapes of the predictions": kinds},
        advice=_ADVICE,
        names={"the weights": "these are checksums"},
    )


def gathered_outputs(outputs: Any, num_rows: int) -> Any:
    """Gather outputs of which rank r of N has the rows r, r + N, …."""
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else _gathered(leaf, num_rows), outputs
    )


def _gathered(leaf: np.ndarray, num_rows: int) -> np.ndarray:
    """Gather the rows of all ranks in the order of the data, piece by piece."""
    size = comm.size()
    whole = np.empty((num_rows, *leaf.shape[1:]), leaf.dtype)
    row_bytes = max(1, leaf.dtype.itemsize * math.prod(leaf.shape[1:]))
    piece = max(1, _MESSAGE_BYTES // row_bytes)
    for begin in range(0, math.ceil(num_rows / size), piece):
        for rank, part in enumerate(comm.gather(leaf[begin : begin + piece])):
            first = begin * size + rank
            whole[first : first + len(part) * size : size] = part
    return whole


def _check_rows(leaf: Any, num_rows: int) -> None:
    is_array = isinstance(leaf, np.ndarray) and leaf.ndim > 0
    if leaf is not None and not (is_array and len(leaf) == num_rows):
        kind = f"{type(leaf).__name__} of shape {tuple(leaf.shape)}"
        raise ValueError(
            "Predictions can be gathered only if an output has one value of one shape "
            f"for each row. Received: an output of type {kind} for {num_rows} rows. "
            "Shard the rows yourself and use DistributedModel(…, "
            'shard="none"), or use model.predict.'
        )


def _checksum(weights: Sequence[Any]) -> int:
    checksum = 0
    for weight in weights:
        checksum = zlib.crc32(keras.ops.convert_to_numpy(weight).tobytes(), checksum)
    return checksum
