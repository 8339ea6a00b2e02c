"""Predict one rank's batches on each rank, and gather the predictions in order.

Gathered predictions are sent piece by piece. With `gather="first"` the first rank alone
keeps them; the other ranks return `None`.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.data.feed import Feed
from keras_dist.training.same_values import read_checksums
from keras_dist.training.session import traced_functions_of
from keras_dist.training.turns import TurnDraws

# Predictions are gathered in pieces; this is the largest piece of one rank.
_MESSAGE_BYTES = 64 * 2**20


def predict_in_turns(
    data: Feed,
    predict: Callable[..., Any],
    model: Any,
    *,
    gather: bool | Literal["first"],
) -> Any:
    """Predict batches that are the same on all ranks: rank r of N has r, r + N, ….

    Args:
        data: This rank's batches, or a copy of one if it has none.
        predict: Predicts batches, without a collective.
        model: The model, whose weights have to be equal on all ranks.
        gather: `True`, `"first"`, or `False` to return only the predictions of this
            rank's batches.

    Raises:
        ValueError: On all ranks, if weights or outputs differ between the ranks.
    """
    session = vars(model).get("_distributed_session")
    traced = traced_functions_of(model) if session is None else session.traced
    turn = traced.draw_in_turn(model, "predict")
    with comm.raise_on_all(), _count_rows(model, turn) as counts:
        # Before: a layer may count what it predicts.
        checksums = read_checksums(model.weights)
        outputs = predict(data.data)
    if len(model.weights) > len(checksums):  # it was not built
        checksums = read_checksums(model.weights)
    leaves = keras.tree.flatten(outputs)
    arrays = [leaf for leaf in leaves if leaf is not None]
    comm.agree(
        {
            "the weights": hash(checksums),
            "the shapes of the predictions": [
                (leaf.shape[1:], str(leaf.dtype)) for leaf in arrays
            ],
        },
        advice="Give every rank the same model, weights, data and arguments.",
        names={"the weights": "these are checksums"},
    )
    turn.finish(has_rows=any(map(any, counts)))
    if not gather:
        return outputs
    local_bytes = [0 if leaf is None else _row_bytes(leaf) for leaf in leaves]
    by_rank, bytes_by_rank = zip(*comm.gather((counts, local_bytes)), strict=True)
    keeps = gather is True or comm.rank() == 0
    gathered = []
    for index, leaf in enumerate(leaves):
        # Arrays of outputs may have other numbers of rows than the batches.
        rows = _list_rows_in_turns([[b[index] for b in own] for own in by_rank])
        row_bytes = max(own[index] for own in bytes_by_rank)  # rows may differ
        length = max(1, _MESSAGE_BYTES // max(1, row_bytes))
        is_array = leaf is not None
        gathered.append(_gather_leaf(leaf, rows, length, keeps) if is_array else None)
    return keras.tree.pack_sequence_as(outputs, gathered) if keeps else None


@contextlib.contextmanager
def _count_rows(model: Any, turn: TurnDraws) -> Iterator[list[list[int]]]:
    """Context manager that counts what `model.predict` returns for each batch.

    Keras's callbacks get outputs with nested names flattened, and of a batch of one row
    perhaps a number.

    Args:
        model: The model.
        turn: What the batches draw.

    Yields:
        For each batch, the rows of each array of the outputs.
    """
    counts: list[list[int]] = []
    before = model.steps_per_execution
    if before != 1:
        model.steps_per_execution, model.predict_function = 1, None
    model.make_predict_function()
    plain = model.predict_function

    def predict(data: Any) -> Any:
        turn.find(lambda: plain(data), 1)
        outputs = turn.run(lambda: plain(data))
        leaves = keras.tree.flatten(outputs)
        counts.append([0 if leaf is None else int(leaf.shape[0]) for leaf in leaves])
        return outputs

    model.predict_function = predict
    try:
        yield counts
    finally:
        model.steps_per_execution = before
        model.predict_function = plain if before == 1 else None


def _gather_leaf(
    leaf: Any, rows: Sequence[np.ndarray], length: int, keeps: bool
) -> Any:
    """Gather the rows of all ranks, `length` at a time, and put them in order.

    `rows` has for each rank the index of each row among all.
    """
    is_ragged = isinstance(leaf, tf.RaggedTensor)
    result = None
    if keeps and not is_ragged:
        result = np.empty((sum(map(len, rows)), *leaf.shape[1:]), leaf.dtype)
    order: list[np.ndarray] = []
    ragged: list[Any] = []
    for begin in range(0, max(map(len, rows)), length):
        pieces = comm.gather(_sendable(leaf[begin : begin + length]))
        for indices, piece in zip(rows, pieces, strict=True):
            if result is not None:
                result[indices[begin : begin + length]] = piece
            elif keeps:
                order.append(indices[begin : begin + length])
                ragged.append(tf.RaggedTensor.from_nested_row_splits(*piece))
    if is_ragged and keeps:
        return tf.gather(tf.concat(ragged, 0), np.argsort(np.concatenate(order)))
    return result


def _list_rows_in_turns(counts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Find each rank's rows where rank r of N has the batches r, r + N, ….

    Args:
        counts: For each rank, the rows of each of its batches.

    >>> [rows.tolist() for rows in _list_rows_in_turns([[2, 1], [2]])]
    [[0, 1, 4], [2, 3]]
    """
    turns = itertools.zip_longest(*counts, fillvalue=0)
    lengths = np.fromiter(itertools.chain.from_iterable(turns), int)
    ranks = np.repeat(np.arange(len(lengths)) % len(counts), lengths)
    return [np.flatnonzero(ranks == rank) for rank in range(len(counts))]


def _sendable(leaf: Any) -> Any:
    """Return an array as it is, and a ragged tensor as arrays that can be sent."""
    if not isinstance(leaf, tf.RaggedTensor):
        return leaf
    return leaf.flat_values.numpy(), [part.numpy() for part in leaf.nested_row_splits]


def _row_bytes(leaf: Any) -> int:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.flat_values.numpy().nbytes // max(1, leaf.shape[0])
    return leaf.dtype.itemsize * math.prod(leaf.shape[1:])
