"""Sparse gradients, as of an `Embedding`: only few rows are not zero."""

import math
from typing import Any

import tensorflow as tf

from keras_dist import comm


def merged(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once: repeated rows are added up."""
    rows, index = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, index, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def counts_of_ranks(slices: tf.IndexedSlices, dtype: Any) -> Any:
    """A vector of zeros, with this rank's number of rows at the index of its rank.

    The sum over all ranks holds the number of rows of each rank.
    """
    count = tf.cast(tf.shape(slices.indices)[0], dtype)
    return count * tf.one_hot(comm.rank(), comm.size(), dtype=dtype)


def sum_of_ranks(
    slices: tf.IndexedSlices, shape: Any, counts: Any, *, name: str
) -> Any:
    """Sum a gradient over all ranks, sent as rows or whole, whichever is smaller.

    Args:
        slices: This rank's gradient, each row once.
        shape: Shape of the variable.
        counts: The number of rows of each rank. It is equal on all ranks, so all make
            the same choice.
        name: A fixed name, the same on all ranks.

    Returns:
        A dense tensor: Keras's optimizers would make one of it anyway.
    """
    values, indices = slices.values, slices.indices
    row_bytes = math.prod(shape[1:]) * values.dtype.size
    # A rank receives the rows of all ranks, or in a ring allreduce the whole gradient
    # twice.
    as_rows = tf.reduce_sum(counts) * (row_bytes + indices.dtype.size)
    as_whole = tf.cast(2 * shape[0] * row_bytes, as_rows.dtype)

    def gather_rows() -> Any:
        all_values = comm.gather_rows(values, name=f"{name}.values")
        all_indices = comm.gather_rows(indices, name=f"{name}.indices")
        total = tf.zeros(shape, values.dtype)
        ends = tf.cumsum(tf.cast(counts, tf.int32))
        begins = tf.concat([[0], ends[:-1]], axis=0)
        # In the order of the ranks, so that all ranks get the same bits.
        for rank in range(comm.size()):
            rows = tf.range(begins[rank], ends[rank])
            total = tf.tensor_scatter_nd_add(
                total,
                tf.gather(all_indices, rows)[:, tf.newaxis],
                tf.gather(all_values, rows),
            )
        return total

    def sum_whole() -> Any:
        own = tf.IndexedSlices(values, indices, tf.constant(shape, indices.dtype))
        dense = tf.reshape(tf.convert_to_tensor(own), shape)
        return comm.sum_tensors([dense], name=f"{name}.dense", dtype=values.dtype)[0]

    return tf.cond(as_rows < as_whole, gather_rows, sum_whole)
