"""Sparse gradients, as of an `Embedding`: only few rows are not zero.

One process of Keras gets a slice for each row that a batch reads, a row that is read
twice twice. What its optimizers do with each slice is not always what they would do
with the sum.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin
from keras_dist.optimizer.nested import leaves, nested_optimizers


def may_merge(optimizer: Any) -> bool:
    """Whether an update is the same if repeated rows are added up before it.

    It is so for an optimizer that computes with gradients only what is linear in them,
    and for those that accumulate, since Keras then adds up whole gradients first. Most
    square each slice, and clip by each slice, too. What an optimizer of the user does
    is not known.
    """
    outer = nested_optimizers(optimizer)
    wrappers = outer if leaves(optimizer) != outer[-1:] else outer[:-1]
    inner = leaves(optimizer)  # none before a `MultiOptimizer` is built
    return bool(inner) and all([*map(_is_of_keras, wrappers), *map(_is_linear, inner)])


def _is_linear(leaf: Any) -> bool:
    if not _is_of_keras(leaf):
        return False
    # Keras cannot divide slices by a loss scale that is a number.
    if leaf.gradient_accumulation_steps or leaf.loss_scale_factor is not None:
        return True
    linear = (keras.optimizers.SGD, keras.optimizers.Lion)
    is_clipped = leaf.clipnorm or leaf.global_clipnorm or leaf.clipvalue
    return leaf.__class__ in linear and not is_clipped


def _is_of_keras(optimizer: Any) -> bool:
    """Whether the class is Keras's own, not one that a user has derived from it."""
    own = optimizer.__class__
    return getattr(keras.optimizers, own.__name__, None) is own


def is_ordered() -> bool:
    """Whether this rank adds up repeated rows in the same order each time.

    Operations on a GPU do not, and then the weights of the ranks would drift apart by
    roundings.
    """
    return not tf.config.get_visible_devices("GPU")


def with_shape(gradient: Any, variable: Any) -> Any:
    """A gradient; if it is `tf.IndexedSlices`, with the shape of its variable."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.constant(tuple(variable.shape), tf.int64)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def gathered(slices: tf.IndexedSlices, shape: Any, *, name: str) -> tf.IndexedSlices:
    """The slices of all ranks in rank order, repeated rows repeated.

    Args:
        slices: This rank's gradient, of any number of slices, also none.
        shape: Shape of the variable.
        name: A fixed name, the same on all ranks.
    """
    return tf.IndexedSlices(
        comm.gather_rows(slices.values, name=f"{name}.values"),
        comm.gather_rows(slices.indices, name=f"{name}.indices"),
        tf.constant(shape, tf.int64),
    )


def all_or_none_finite(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same slices; if a value is not finite, all values are NaN.

    A `LossScaleOptimizer` looks at one of the slices of a row only.
    """
    values = slices.values
    is_finite = tf.reduce_all(tf.math.is_finite(values))
    values = tf.where(is_finite, values, tf.constant(math.nan, values.dtype))
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


@contextlib.contextmanager
def added_in_order(optimizer: Any, gradients: Sequence[Any]) -> Iterator[None]:
    """Inside the block, each rank that makes an update gets the same bits.

    TensorFlow's scatter adds a thousand slices and more in several threads, repeated
    rows in any order. The conversion to a whole gradient has one order.

    Args:
        optimizer: The optimizer that makes the update.
        gradients: The gradients of the update, which are those of all ranks.
    """
    has_rows = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    changed = leaves(optimizer) if has_rows and comm.size() > 1 else []
    changed = [leaf for leaf in changed if not mixin.has(leaf, AddsInOrder)]
    try:
        for leaf in changed:
            mixin.add(leaf, AddsInOrder)
        yield
    finally:
        for leaf in changed:
            mixin.remove(leaf, AddsInOrder)


class AddsInOrder:
    """Mixin for a leaf: slices are added up before they are added to a variable."""

    def assign_add(self, variable: Any, value: Any) -> None:
        super().assign_add(variable, _whole(value))  # type: ignore[misc]

    def assign_sub(self, variable: Any, value: Any) -> None:
        super().assign_sub(variable, _whole(value))  # type: ignore[misc]


def _whole(value: Any) -> Any:
    is_rows = isinstance(value, tf.IndexedSlices)
    return tf.convert_to_tensor(value) if is_rows else value


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
