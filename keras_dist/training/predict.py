"""Predict one rank's rows on each rank, and gather the predictions in their order."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.data import Arrays, Presharded, Source
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
    arrays = Arrays.of(x)
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
    own = arrays.own_or_first(rank=rank, size=size)
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
    _agree_on_outputs(outputs, weights())
    return _gathered(outputs, arrays.num_rows) if gather else outputs


def predict_presharded(
    dataset: Any,
    presharded: Presharded,
    predict: Callable[[Any], Any],
    weights: Callable[[], Sequence[Any]],
) -> Any:
    """Predict all rows of presharded data; return them in the order before `shard`.

    Args:
        dataset: This rank's batches.
        presharded: How they were divided, by row or by batch.
        predict: Predicts a data set, without a collective.
        weights: Returns the weights that have to be equal on all ranks; called when the
            model is built.

    Raises:
        ValueError: On all ranks, if it is not known which row a prediction is of.
    """
    source, size = Source.of(dataset), presharded.size

    def outputs_of_rows() -> Any:
        is_empty = source.length == 0 or not source.first(1)
        return None if is_empty else predict(dataset)

    outputs = comm.run_on_all(outputs_of_rows)
    counts = comm.gather(None if outputs is None else _num_rows(outputs))
    total = sum(filter(None, counts))
    expected = [presharded.rows_of(rank, total) for rank in range(size)]
    if presharded.has_batches or total == 0 or [n or 0 for n in counts] != expected:
        raise ValueError(
            "The predictions of divided data can be gathered only if each row has one, "
            f"in order. Received: {counts} predictions of ranks 0 to {size - 1}, of "
            f"{source.type_name}, divided by {presharded.by}. Divide it by rows, leave "
            "none out after `shard`, or pass gather=False."
        )
    # The first rank has a row if any has one.
    empty = keras.tree.map_structure(_without_rows, outputs)
    empty = comm.broadcast(empty if comm.rank() == 0 else None)
    outputs = empty if outputs is None else outputs
    _agree_on_outputs(outputs, weights())
    if presharded.by == "rows":
        return _gathered(outputs, total)
    by_rank = [presharded.rows_at(rank, total) for rank in range(size)]
    order = np.argsort(np.concatenate(by_rank))

    def in_order(leaf: Any) -> Any:
        return None if leaf is None else np.concatenate(comm.gather(leaf))[order]

    return keras.tree.map_structure(in_order, outputs)


def _agree_on_outputs(outputs: Any, weights: Sequence[Any]) -> None:
    """Raise an error on all ranks if their weights, or kinds of outputs, differ."""
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if leaf is not None]
    kinds = [(leaf.shape[1:], str(leaf.dtype)) for leaf in leaves]
    comm.agree(
        {"the weights": _checksum(weights), "the shapes of the predictions": kinds},
        advice=_ADVICE,
        names={"the weights": "these are checksums"},
    )


def _gathered(outputs: Any, num_rows: int) -> Any:
    """Gather the outputs of all ranks: rank r of N has the rows r, r + N, …."""
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else _gathered_leaf(leaf, num_rows), outputs
    )


def _gathered_leaf(leaf: np.ndarray, num_rows: int) -> np.ndarray:
    """Put the rows of all ranks in the order of the data, piece by piece."""
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


def _num_rows(outputs: Any) -> int:
    """Count the rows of outputs; -1 if they are not arrays of equally many rows."""
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if leaf is not None]
    if not all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
        return -1
    counts = {len(leaf) for leaf in leaves}
    return counts.pop() if len(counts) == 1 else -1


def _without_rows(leaf: Any) -> Any:
    return None if leaf is None else leaf[:0]
