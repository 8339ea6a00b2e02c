"""Shard a `tf.data.Dataset` of known length by batch, round robin.

Rank r of N reads the batches r, r + N, …. If the number of batches is not a multiple of
N, fewer than N batches are left for the last step: these are called the tail here, and
their rows are sharded.
"""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data import leftover
from keras_dist.data.batches_stream import num_rows

# Stands in the error of a pass whose last round has too few batches.
_TAIL = "Batches after the last full round: expected to contain others but contained"


def shard_dataset(
    dataset: tf.data.Dataset,
    *,
    length: float,
    rank: int,
    size: int,
    is_training: bool,
    rule: str = "cut",
    is_marked: bool = False,
) -> tf.data.Dataset:
    """This rank's batches of a data set of known or infinite length.

    In training, all ranks make the same number of steps. So a tail whose rows are
    divided is left out if it has fewer rows than there are ranks.

    Each rank reads all batches of a step, to the end of the data: a rank that stopped
    before it would cut a cache in `dataset` short (see `first_batches`).

    Args:
        dataset: The same batches on all ranks.
        length: Number of these batches, or `math.inf`.
        rank: This rank.
        size: Number of ranks.
        is_training: Whether all ranks have to make the same number of steps.
        rule: What becomes of the tail, as `leftover.rule_of` returns it.
        is_marked: Whether each element is a batch and a mark (`leftover.marked`).
    """
    if length == float("inf"):
        return dataset.shard(size, rank)
    if size == 1:
        return checked_length(dataset, int(length))
    needed = size if is_training else rank + 1
    in_tail = tf.constant(length % size, tf.int64)
    # `flat_map` unpacks batches that are tuples, also tuples of one.
    is_tuple = type(dataset.element_spec) is tuple
    everything, nothing = tf.constant(size, tf.int64), tf.constant(0, tf.int64)

    def with_mark(batches: tf.data.Dataset, has_rows: Any) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def mark(*batch: Any) -> Any:
            return leftover.marked(batch if is_tuple else batch[0], has_rows)

        return batches.map(mark) if is_marked else batches

    def cut(tail: tf.data.Dataset, is_tail: tf.Tensor) -> tf.data.Dataset:
        lengths = tail.map(lambda *batch: tf.cast(_row_count(batch), tf.int64))
        is_used = is_tail & (lengths.reduce(nothing, tf.add) >= needed)
        rows = tail.take(tf.where(is_used, everything, nothing)).unbatch()
        return with_mark(rows.shard(size, rank).batch(2**30), tf.constant(True))

    def whole(tail: tf.data.Dataset, is_tail: tf.Tensor) -> tf.data.Dataset:
        tail = tail.take(tf.where(is_tail, everything, nothing))
        if not is_training:
            return tail.shard(size, rank)
        one = tail.skip(leftover.own_index(rank, max(int(length % size), 1))).take(1)
        return with_mark(one, tf.constant(rank < length % size))

    @tf.autograph.experimental.do_not_convert
    def shard_round(*components: Any) -> tf.data.Dataset:
        batches = tf.data.Dataset.zip(components if is_tuple else components[0])
        count = batches.cardinality()
        is_full = count == size
        # `window` takes an error at the end of the data for the end itself.
        check = tf.debugging.Assert(is_full | (count == in_tail), [_TAIL, count])
        with tf.control_dependencies([check]):
            own = batches.take(tf.where(is_full, everything, nothing))
        own = with_mark(own.shard(size, rank), tf.constant(True))
        if rule == "cut":
            return own.concatenate(cut(batches, ~is_full))
        if rule == "whole":
            return own.concatenate(whole(batches, ~is_full))
        if rule == "either":
            is_even = leftover.are_even(batches)
            own = own.concatenate(cut(batches, ~is_full & is_even))
            return own.concatenate(whole(batches, ~is_full & ~is_even))
        return own

    windows = dataset.window(size)
    return checked_length(windows, math.ceil(length / size)).flat_map(shard_round)


def checked_length(dataset: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """The same batches; a pass over more or fewer of them than `length` is an error.

    Keras takes fewer for the end of the epoch, and the other ranks would wait.
    """
    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def known_tail_rows(dataset: tf.data.Dataset, *, length: int, size: int) -> int | None:
    """Rows in the tail, or `None` if the batches are not known to be equally long.

    >>> data = tf.data.Dataset.range(50).batch(10, drop_remainder=True)
    >>> known_tail_rows(data, length=5, size=3)
    20
    """
    first = keras.tree.flatten(dataset.element_spec)[0]
    rows_per_batch = first.shape[0] if first.shape.rank else None
    if length % size == 0:
        return 0
    return None if rows_per_batch is None else (length % size) * rows_per_batch


def with_length(
    dataset: tf.data.Dataset, steps: int, *, may_be_shorter: bool
) -> tf.data.Dataset:
    """The same batches, with a cardinality of `steps` for Keras to see.

    Args:
        dataset: A data set of `steps` batches.
        steps: Number of batches.
        may_be_shorter: Whether one pass may have fewer batches, as the epoch has in
            which a training is resumed. `assert_cardinality` would raise an error then.

    >>> data = with_length(tf.data.Dataset.range(2), 5, may_be_shorter=True)
    >>> int(data.cardinality()), len(list(data))
    (5, 2)
    """
    if not may_be_shorter:
        return dataset.apply(tf.data.experimental.assert_cardinality(steps))
    # A choice between two data sets, of which the second is infinite and never chosen.
    # TensorFlow takes the choice to be infinite, and its first `steps` batches to be
    # `steps`; reading still ends where `dataset` ends.
    first = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat()
    dataset = tf.data.Dataset.choose_from_datasets([dataset, dataset.repeat()], first)
    return dataset.take(steps)


def without_auto_shard(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set, prefetched, which TensorFlow is not to shard once more."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def rows_of_batches(batches: list[Any], *, rank: int, size: int) -> Any:
    """Rows `rank`, `rank` + `size`, … of some batches, joined to one batch.

    >>> batches = [np.arange(3), np.arange(3, 5)]
    >>> [rows_of_batches(batches, rank=r, size=2) for r in range(2)]
    [array([0, 2, 4]), array([1, 3])]
    """
    slices, begin = [], 0
    for batch in batches:
        indices = slice((rank - begin) % size, None, size)
        slices.append(
            keras.tree.map_structure(
                lambda leaf, indices=indices: None if leaf is None else leaf[indices],
                batch,
            )
        )
        begin += num_rows(batch)
    if len(slices) == 1:
        return slices[0]
    return keras.tree.map_structure(_joined, *slices)


def _joined(*leaves: Any) -> Any:
    if leaves[0] is None:
        return None
    if tf.is_tensor(leaves[0]):
        return tf.concat(leaves, axis=0)
    return np.concatenate([np.asarray(leaf) for leaf in leaves])


def _row_count(batch: Any) -> Any:
    """Rows in a batch, as a tensor."""
    leaf = keras.tree.flatten(batch)[0]
    return leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0]
