"""Predict one rank's rows on each rank, and gather the predictions in their order.

Gathered predictions are sent piece by piece. With `gather="first"` the first rank alone
keeps them; the other ranks return `None`.
"""

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.data import Arrays, Part, Presharded, Source
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
    predict: Callable[..., Any],
    weights: Callable[[], Sequence[Any]],
    *,
    gather: bool | str,
) -> Any:
    """Predict all rows; each rank predicts its shard of them.

    Args:
        arrays: All rows; every rank holds them.
        predict: Predicts arrays of rows, without a collective; it takes the place of a
            batch, too (`WritePredictions`). `None` if they were written.
        weights: Returns the weights that have to be equal on all ranks; called when the
            model is built.
        gather: `True`, `"first"`, or `False` to return only the predictions of rows
            `[rank::size]`.

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
        outputs = predict(own.x, place=by_rows if has_rows else nowhere)
        for leaf in keras.tree.flatten(outputs):
            _check_rows(leaf, own.num_rows)
        return keras.tree.map_structure(
            lambda leaf: leaf if has_rows or leaf is None else leaf[:0], outputs
        )

    outputs = comm.run_on_all(outputs_of_rows)
    _agree_on_outputs(outputs, weights())
    return _gathered(outputs, arrays.num_rows, gather) if gather else outputs


def predict_presharded(
    dataset: Any,
    presharded: Presharded,
    predict: Callable[[Any], Any],
    weights: Callable[[], Sequence[Any]],
    *,
    gather: bool | str,
) -> Any:
    """Predict all rows of presharded data; return them in the order before `shard`.

    Args:
        dataset: This rank's batches.
        presharded: How they were divided, by row or by batch.
        predict: Predicts a data set, without a collective.
        weights: Returns the weights that have to be equal on all ranks; called when the
            model is built.
        gather: `True` or `"first"`.

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
        return _gathered(outputs, total, gather)
    by_rank = [presharded.rows_at(rank, total) for rank in range(size)]
    order = np.argsort(np.concatenate(by_rank))

    def in_order(leaf: Any) -> Any:
        return None if leaf is None else np.concatenate(comm.gather(leaf))[order]

    whole = keras.tree.map_structure(in_order, outputs)
    return whole if _keeps(gather) else None


def predict_in_turns(
    part: Part,
    predict: Callable[..., Any],
    weights: Callable[[], Sequence[Any]],
    *,
    steps: int | None,
    gather: bool | str,
) -> Any:
    """Predict batches that are the same on all ranks: rank r of N has r, r + N, ….

    Args:
        part: This rank's batches, or a copy of a row if it has none.
        predict: Predicts batches, without a collective. It takes them, the number of
            steps, what to do with the outputs of a batch, and its place. `None` if they
            were written.
        weights: Returns the weights that have to be equal on all ranks; called when the
            model is built.
        steps: Batches of all ranks, or `None` for all that there are.
        gather: `True`, `"first"`, or `False` to return only the predictions of this
            rank's batches.

    Raises:
        ValueError: On all ranks, if weights or outputs differ between the ranks.
    """
    own_steps = None if steps is None else len(range(comm.rank(), steps, comm.size()))
    has_rows = part.has_rows and own_steps != 0
    counts: list[list[int]] = []  # rows of each batch, for each array of outputs

    def counted(outputs: Any) -> Any:
        leaves = keras.tree.flatten(outputs)
        counts.append([0 if leaf is None else int(leaf.shape[0]) for leaf in leaves])
        return outputs

    def outputs_of_batches() -> Any:
        limit = None if own_steps is None else max(1, own_steps)
        place = in_turns_of_ranks if has_rows else nowhere
        limit = limit if part.has_rows else None
        outputs = predict(part.data, limit, use=counted, place=place)
        if has_rows:
            return outputs
        return keras.tree.map_structure(_without_rows, outputs)

    outputs = comm.run_on_all(outputs_of_batches)
    _agree_on_outputs(outputs, weights())
    if not gather:
        return outputs
    by_rank = comm.gather(counts if has_rows else [])
    leaves = [
        None if leaf is None else _batches_in_order(leaf, index, by_rank, gather)
        for index, leaf in enumerate(keras.tree.flatten(outputs))
    ]
    return keras.tree.pack_sequence_as(outputs, leaves) if _keeps(gather) else None


def in_turns_of_ranks(step: int, count: int) -> tuple[Any, Any]:
    """Place the rows of this rank's batch: rank r of N has the batches r, r + N, …."""
    return step * comm.size() + comm.rank(), np.arange(count)


def by_rows(step: int, count: int) -> tuple[Any, Any]:
    """Place the rows of this rank's batch: it has the rows r, r + N, … of all."""
    return step, np.arange(count) * comm.size() + comm.rank()


def nowhere(step: int, count: int) -> None:
    """Place rows that are copies of another rank's."""


@contextlib.contextmanager
def each_batch(model: Any, use: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the block, `model.predict` keeps what `use` makes of each batch's outputs.

    Keras's callbacks get outputs with nested names flattened, and of a batch of one row
    perhaps a number.

    Args:
        model: A `keras.Model`.
        use: Called with the outputs of each batch, in order.
    """
    before = model.steps_per_execution
    if before != 1:
        model.steps_per_execution, model.predict_function = 1, None
    model.make_predict_function()
    plain = model.predict_function
    model.predict_function = lambda data: use(plain(data))
    try:
        yield
    finally:
        model.steps_per_execution = before
        model.predict_function = plain if before == 1 else None


def _batches_in_order(
    leaf: Any, index: int, by_rank: list[list[list[int]]], gather: bool | str
) -> Any:
    """Gather the batches of all ranks, some steps at a time, in their order.

    Args:
        leaf: This rank's outputs: an array, or a `tf.RaggedTensor`.
        index: Index of the leaf.
        by_rank: For each rank and batch, the rows of each leaf.
        gather: `True` or `"first"`.
    """
    counts = [[rows[index] for rows in own] for own in by_rank]
    steps = max(map(len, counts))
    starts: dict[tuple[int, int], int] = {}
    total = 0
    for step in range(steps):
        for rank, own in enumerate(counts):
            if step < len(own):
                starts[rank, step] = total
                total += own[step]
    is_ragged = isinstance(leaf, tf.RaggedTensor)
    row_bytes = max(comm.gather(_bytes_of_row(leaf)))  # rows may differ in length
    whole = None
    if _keeps(gather) and not is_ragged:
        whole = np.empty((total, *leaf.shape[1:]), leaf.dtype)
    parts: dict[int, Any] = {}
    sent, step = 0, 0
    while step < steps:
        end, rows = step + 1, _most_rows(counts, step)
        while end < steps and (rows + _most_rows(counts, end)) * row_bytes <= (
            _MESSAGE_BYTES
        ):
            rows += _most_rows(counts, end)
            end += 1
        length = sum(counts[comm.rank()][step:end])
        pieces = comm.gather(_packed(leaf[sent : sent + length]))
        sent += length
        for rank, piece in enumerate(pieces):
            begin = 0
            for number in range(step, min(end, len(counts[rank]))):
                length = counts[rank][number]
                start = starts[rank, number]
                if whole is not None:
                    whole[start : start + length] = piece[begin : begin + length]
                elif _keeps(gather):
                    parts[start] = _unpacked(piece)[begin : begin + length]
                begin += length
        step = end
    if is_ragged and _keeps(gather):
        return tf.concat([parts[start] for start in sorted(parts)], 0)
    return whole


def _most_rows(counts: list[list[int]], step: int) -> int:
    return max(own[step] if step < len(own) else 0 for own in counts)


def _packed(leaf: Any) -> Any:
    """Return an array as it is, and a ragged tensor as arrays that can be sent."""
    if not isinstance(leaf, tf.RaggedTensor):
        return leaf
    splits = [part.numpy() for part in leaf.nested_row_splits]
    return leaf.flat_values.numpy(), splits


def _unpacked(packed: Any) -> Any:
    return tf.RaggedTensor.from_nested_row_splits(*packed)


def _bytes_of_row(leaf: Any) -> int:
    if isinstance(leaf, tf.RaggedTensor):
        return max(1, len(leaf.flat_values.numpy().tobytes()) // max(1, leaf.shape[0]))
    return max(1, leaf.dtype.itemsize * math.prod(leaf.shape[1:]))


def _keeps(gather: bool | str) -> bool:
    """Tell whether this rank returns the predictions of all."""
    return gather is True or comm.rank() == 0


def _agree_on_outputs(outputs: Any, weights: Sequence[Any]) -> None:
    """Raise an error on all ranks if their weights, or kinds of outputs, differ."""
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if leaf is not None]
    kinds = [(leaf.shape[1:], str(leaf.dtype)) for leaf in leaves]
    comm.agree(
        {"the weights": _checksum(weights), "the shapes of the predictions": kinds},
        advice=_ADVICE,
        names={"the weights": "these are checksums"},
    )


def _gathered(outputs: Any, num_rows: int, gather: bool | str) -> Any:
    """Gather the outputs of all ranks: rank r of N has the rows r, r + N, …."""
    whole = keras.tree.map_structure(
        lambda leaf: None if leaf is None else _gathered_leaf(leaf, num_rows, gather),
        outputs,
    )
    return whole if _keeps(gather) else None


def _gathered_leaf(
    leaf: np.ndarray, num_rows: int, gather: bool | str
) -> np.ndarray | None:
    """Put the rows of all ranks in the order of the data, piece by piece."""
    size, whole = comm.size(), None
    if _keeps(gather):
        whole = np.empty((num_rows, *leaf.shape[1:]), leaf.dtype)
    piece = max(1, _MESSAGE_BYTES // _bytes_of_row(leaf))
    for begin in range(0, math.ceil(num_rows / size), piece):
        for rank, part in enumerate(comm.gather(leaf[begin : begin + piece])):
            first = begin * size + rank
            if whole is not None:
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
