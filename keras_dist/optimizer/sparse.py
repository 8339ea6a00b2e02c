"""Gradients of which few rows are not zero, as an `Embedding` has them."""

import math
from typing import Any

import tensorflow as tf

from keras_dist import comm


def merged(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once: repeated ones are added up."""
    rows, index = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, index, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def counts_of_ranks(slices: tf.IndexedSlices, dtype: Any) -> Any:
    """A vector of zeros, with the number of this rank's rows at its rank's place.

    Summed over the ranks it holds the number of each.
    """
    count = tf.cast(tf.shape(slices.indices)[0], dtype)
    return count * tf.one_hot(comm.rank(), comm.size(), dtype=dtype)


def sum_of_ranks(
    slices: tf.IndexedSlices, shape: Any, counts: Any, *, name: str
) -> Any:
    """Sum of a gradient over all ranks, moved as rows or whole, whichever is less.

    Args:
        slices: This rank's part, each row once.
        shape: Of the variable.
        counts: How many rows each rank has: the same on all ranks, so that they
            decide alike.
        name: Fixed, and the same on all ranks.

    Returns:
        A dense tensor: the optimizers of Keras make one of it anyway.
    """
    values, indices = slices.values, slices.indices
    row_bytes = math.prod(shape[1:]) * values.dtype.size
    # Each rank receives all rows of the others; of a whole gradient, two times all.
    as_rows = tf.reduce_sum(counts) * (row_bytes + indices.dtype.size)
    as_whole = tf.cast(2 * shape[0] * row_bytes, as_rows.dtype)

    def gather_rows() -> Any:
        all_values = comm.gather_rows(values, name=f"{name}.values")
        all_indices = comm.gather_rows(indices, name=f"{name}.indices")
        total = tf.zeros(shape, values.dtype)
        ends = tf.cumsum(tf.cast(counts, tf.int32))
        begins = tf.concat([[0], ends[:-1]], axis=0)
        # One rank after the other, so that all add in the same order: the same bits.
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
