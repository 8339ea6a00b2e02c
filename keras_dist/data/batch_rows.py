"""Which rows of the global batch a rank's batch is: three numbers beside each batch.

They are made where the batch is made, and travel with it through data sets and Keras's
adapters to the step. One process with the global batch has all rows of it; each rank
has some that lie side by side, in the order of the ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

# Keys of a dict, which Keras's adapters pass on as it is: the batch; beside it the rows
# that count, alone, or with the two other numbers. A key and not a value says which, so
# that a graph knows it.
_BATCH, _OWN, _KNOWN = (f"keras_dist.{name}" for name in ("batch", "own", "rows"))

# A number of rows that no batch has.
_ALL_ROWS = 2**30


class BatchRows(NamedTuple):
    """The rows of one rank in a step; numbers, or scalar tensors.

    Args:
        rows: How many rows of the batch count: 0 if it is a copy of another rank's, of
            a rank that only takes part.
        begin: Index in the global batch of the first one; `None` if unknown.
        total: Rows of all ranks in the step; `None` if unknown.
    """

    rows: Any
    begin: Any = None
    total: Any = None


def own_span(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Find a rank's part of the rows of a global batch: its first, and after its last.

    The parts lie side by side, and their lengths differ by one at most. `rows` may be a
    tensor.

    >>> [own_span(5, rank, 3) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    return (rank * rows + size - 1) // size, ((rank + 1) * rows + size - 1) // size


def put_beside(batch: Any, rows: BatchRows) -> dict[str, Any]:
    """Put the numbers beside a batch."""
    is_known = rows.total is not None
    numbers = list(rows) if is_known else [rows.rows]
    if tf.executing_eagerly():  # also in a process without TensorFlow's devices
        beside: Any = np.array([list(map(int, numbers))], "int32")
    else:
        beside = tf.stack([[tf.cast(number, tf.int32) for number in numbers]])
    return {_BATCH: batch, _KNOWN if is_known else _OWN: beside}


def put_beside_spec(spec: Any) -> dict[str, Any]:
    """Return the spec of a batch with its three numbers beside it."""
    return {_BATCH: spec, _KNOWN: tf.TensorSpec([1, 3], tf.int32)}


def take_off(data: Any) -> tuple[Any, BatchRows]:
    """Split what a step is given into the batch and its rows.

    All rows count of a batch without numbers beside it.
    """
    batch = batch_of(data)
    if batch is data:
        return data, BatchRows(num_rows(data))
    numbers = data[_KNOWN if _KNOWN in data else _OWN]
    return batch, BatchRows(*tf.unstack(tf.reshape(numbers, [numbers.shape[-1]])))


def batch_of(data: Any) -> Any:
    """Return a batch, or the spec of one, without what is beside it."""
    return data[_BATCH] if isinstance(data, dict) and _BATCH in data else data


def change_batch(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return `change(batch)`, with the numbers that are beside the batch."""
    batch = batch_of(data)
    return change(data) if batch is data else {**data, _BATCH: change(batch)}


def num_rows(data: Any) -> Any:
    """Rows in a batch: the length of the first axis of its targets, or of its inputs.

    Inputs may be longer, as the atoms of a batch of molecules that is one graph. A
    longer tuple is for a step of the user's: its first tensor counts.
    """
    x, y = data, None
    if not isinstance(data, tuple) or len(data) <= 3:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    for leaf in (*keras.tree.flatten(y), *keras.tree.flatten(x)):
        if not is_number(leaf):
            return _count_rows(leaf)
    return 1


def is_number(leaf: Any) -> bool:
    """Return True for a part of a batch without rows: a number, or `None`."""
    shape = getattr(leaf, "shape", ())
    return getattr(shape, "rank", len(shape) if isinstance(shape, tuple) else 1) == 0


def _count_rows(leaf: Any) -> Any:
    """Return the length of the first axis: an integer if it is known, else a tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    known = leaf.shape[0]
    return tf.shape(leaf)[0] if known is None else int(known)


def take_own_rows(batch: Any, rank: int, size: int) -> tuple[Any, BatchRows]:
    """Take one rank's rows of a batch that all ranks have read.

    Where it has none, it gets the first row, which does not count. If the tensors of
    the batch differ in length, all ranks get all of it, and it counts on the first one.
    A number beside the rows goes whole to every rank.

    Args:
        batch: Arrays or tensors, in any structure.
        rank: The rank.
        size: Number of ranks.

    >>> take_own_rows(np.arange(5), 1, 2)
    (array([3, 4]), BatchRows(rows=2, begin=3, total=5))
    >>> take_own_rows(np.arange(1), 1, 2)
    (array([0]), BatchRows(rows=0, begin=1, total=1))
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if not is_number(leaf)]
    total = num_rows(batch)
    if not leaves or any(isinstance(leaf, tf.SparseTensor) for leaf in leaves):
        return batch, BatchRows(total if rank == 0 else 0, 0, total)
    lengths = [_count_rows(leaf) for leaf in leaves]
    if all(isinstance(length, int) for length in lengths):
        is_even: Any = len(set(lengths)) == 1
    else:
        is_even = tf.reduce_all(tf.equal(tf.stack(lengths), lengths[0]))
    own = own_span(total, rank, size)
    begin = choose(is_even, own[0], 0 if rank == 0 else total)
    end = choose(is_even, own[1], total)
    span = choose(end > begin, begin, 0), choose(end > begin, end, 1)
    span = choose(is_even, span[0], 0), choose(is_even, span[1], _ALL_ROWS)

    def take(leaf: Any) -> Any:
        if is_number(leaf):
            return leaf
        rows = leaf[slice(*span)]
        if tf.is_tensor(span[1]) and not isinstance(leaf, tf.RaggedTensor):
            # TensorFlow does not know the shape.
            shape = tf.TensorShape([None]).concatenate(leaf.shape[1:])
            rows = tf.ensure_shape(rows, shape)
        return rows

    rows = BatchRows(end - begin, begin, total)
    return tf.nest.map_structure(take, batch), rows


def choose(condition: Any, value: Any, other: Any) -> Any:
    """Return one of two values, in a graph or not."""
    if tf.is_tensor(condition):
        return tf.where(condition, value, other)
    return value if condition else other
