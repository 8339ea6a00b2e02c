"""Deal batches in turn: rank r takes batches r, r + N, …; what is left, row by row."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.sharding.batches_stream import num_rows

# Stands in the error of a pass whose last round has too few batches.
_TAIL = "Batches after the last full round: expected to contain others but contained"


def shard_dataset(
    dataset: tf.data.Dataset,
    *,
    length: float,
    rank: int,
    size: int,
    is_training: bool,
) -> tf.data.Dataset:
    """This rank's batches of a data set of known or endless length.

    In each step the ranks read `size` batches, one each. Fewer may be left at the end:
    their rows are sharded, and make one more step. In training that step needs a row
    for each rank; with fewer, those rows are left out.

    Each rank reads all batches of a step, to the end of the data: a rank that stopped
    before it would cut a cache in `dataset` short (see `first_batches`).

    Args:
        dataset: The same batches on all ranks.
        length: How many there are.
        rank: This rank.
        size: Number of ranks.
        is_training: Whether all ranks have to make the same number of steps.
    """
    if length == float("inf"):
        return dataset.shard(size, rank)
    if size == 1:
        return checked_length(dataset, int(length))
    needed = size if is_training else rank + 1
    in_tail = tf.constant(length % size, tf.int64)
    everything, nothing = tf.constant(size, tf.int64), tf.constant(0, tf.int64)

    def shard_round(*parts: Any) -> tf.data.Dataset:
        batches = tf.data.Dataset.zip(parts if len(parts) > 1 else parts[0])
        count = batches.cardinality()
        is_full = count == size
        # `window` takes an error at the end of the data for the end itself.
        check = tf.debugging.Assert(is_full | (count == in_tail), [_TAIL, count])
        with tf.control_dependencies([check]):
            own = batches.take(tf.where(is_full, everything, nothing))
        lengths = batches.map(lambda *batch: tf.cast(_length(batch), tf.int64))
        has_tail = ~is_full & (lengths.reduce(nothing, tf.add) >= needed)
        tail = batches.take(tf.where(has_tail, everything, nothing)).unbatch()
        own = own.shard(size, rank)
        return own.concatenate(tail.shard(size, rank).batch(2**30))

    rounds = dataset.window(size)
    return checked_length(rounds, math.ceil(length / size)).flat_map(shard_round)


def checked_length(dataset: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """The same batches; a pass over more or fewer of them than `length` is an error.

    Keras takes fewer for the end of the epoch, and the other ranks would wait.
    """
    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def known_rows_left(dataset: tf.data.Dataset, *, length: int, size: int) -> int | None:
    """Rows in the batches that are left over, where all batches are equally long.

    >>> data = tf.data.Dataset.range(50).batch(10, drop_remainder=True)
    >>> known_rows_left(data, length=5, size=3)
    20
    """
    first = keras.tree.flatten(dataset.element_spec)[0]
    in_batch = first.shape[0] if first.shape.rank else None
    if length % size == 0:
        return 0
    return None if in_batch is None else (length % size) * in_batch


def of_length(
    dataset: tf.data.Dataset, steps: int, may_end_before: bool
) -> tf.data.Dataset:
    """The same batches, of which Keras knows how many there are.

    Args:
        dataset: Of `steps` batches, each time it is read.
        steps: How many.
        may_end_before: Whether there are fewer the first time: TensorFlow's own check
            would not let them pass.

    >>> data = of_length(tf.data.Dataset.range(2), 5, may_end_before=True)
    >>> int(data.cardinality()), len(list(data))
    (5, 2)
    """
    if not may_end_before:
        return dataset.apply(tf.data.experimental.assert_cardinality(steps))
    # One of two, of which the second, never chosen, has no end: so the length of the
    # choice counts as endless, which it is not, and the first part of it as `steps`.
    first = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat()
    dataset = tf.data.Dataset.choose_from_datasets([dataset, dataset.repeat()], first)
    return dataset.take(steps)


def unsharded(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Read ahead, and divided by nobody else."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def rows_of_batches(batches: list[Any], *, rank: int, size: int) -> Any:
    """Rows `rank`, `rank` + `size`, … of some batches, taken one after the other.

    >>> batches = [np.arange(3), np.arange(3, 5)]
    >>> [rows_of_batches(batches, rank=r, size=2) for r in range(2)]
    [array([0, 2, 4]), array([1, 3])]
    """
    pieces, begin = [], 0
    for batch in batches:
        indices = slice((rank - begin) % size, None, size)
        pieces.append(
            keras.tree.map_structure(
                lambda leaf, indices=indices: None if leaf is None else leaf[indices],
                batch,
            )
        )
        begin += num_rows(batch)
    if len(pieces) == 1:
        return pieces[0]
    return keras.tree.map_structure(_joined, *pieces)


def _joined(*leaves: Any) -> Any:
    if leaves[0] is None:
        return None
    if tf.is_tensor(leaves[0]):
        return tf.concat(leaves, axis=0)
    return np.concatenate([np.asarray(leaf) for leaf in leaves])


def _length(batch: Any) -> Any:
    leaf = keras.tree.flatten(batch)[0]
    return leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0]
