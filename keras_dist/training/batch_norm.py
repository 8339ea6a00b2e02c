"""Batch normalization by the statistics of the global batch."""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.optimizer import step_context
from keras_dist.training.rows import find_joint_context

# Texts for the plan: the rows of a layer, and what they cost.
GLOBAL, EXCHANGE = "global batch", "batch normalization exchanges within the step"


def synchronize(model: Any, rule: str, undo: contextlib.ExitStack) -> None:
    """Make `BatchNormalization` layers use the rows of all ranks.

    Keras synchronizes layers with `synchronized=True` only under `tf.distribute`.

    Args:
        model: A model whose layers exist.
        rule: `"global"` for all layers, `"rank"` for those with `synchronized=True`.
        undo: What takes it back.
    """
    for layer in _layers(model):
        if _is_global(layer, rule):
            undo.enter_context(mixin.use(layer, GlobalMoments))


def describe_rows(model: Any, rule: str) -> str:
    """Say by which rows the layers that are trained normalize; "" if there are none."""
    layers = [layer for layer in _layers(model) if layer.trainable]
    count = sum(_is_global(layer, rule) for layer in layers)
    texts = {
        GLOBAL: count,
        "rows of each rank: not the model of one process": len(layers) - count,
    }
    return "; ".join(
        f"{number} layer{'s' * (number > 1)}, {text}"
        for text, number in texts.items()
        if number
    )


def explain_unsynchronized(model: Any) -> str:
    """Return a sentence about layers that normalize by the rows of one rank, or ""."""
    names = [
        layer.name
        for layer in _layers(model)
        if layer.trainable and not _is_global(layer, "rank")
    ]
    if not names:
        return ""
    return (
        f"{', '.join(names)}: each rank normalizes by the rows of its own batch, which "
        'is not in these numbers; `synchronized=True`, and `batch_norm="global"` of '
        "`dist_fit`, normalize by all rows. "
    )


class GlobalMoments:
    """Mixin for a `BatchNormalization`: mean and variance of the global batch.

    Only a train step has one. Ranks evaluate and predict other batches, and a callback
    may call the model on one rank.

    In a trial they are constants, so that each row is normalized by itself.

    Attributes:
        in_loops: Whether a call outside of any step is one of a user's loop, which all
            ranks make.
    """

    in_loops = False

    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        context, plain = step_context.current(), super()._moments  # type: ignore[misc]
        if context.trial is not None:
            moments = plain(inputs, mask)
            return [
                context.trial.take_from_whole(tf.stop_gradient(found))
                for found in moments
            ]
        may_be_joint = self.in_loops or step_context.is_inside()
        if not may_be_joint or find_joint_context() is None:
            return plain(inputs, mask)
        count, mean, squares = _own_moments(inputs, mask, self._reduction_axes)
        count, squares = map(context.count_own, (count, squares))
        shape = tf.shape(mean)
        own = tf.concat(
            [tf.reshape(count, [1]), tf.reshape(mean, [-1]), tf.reshape(squares, [-1])],
            axis=0,
        )
        everyone = _gather(own)
        counts = everyone[:, :1]
        means, squares = tf.split(everyone[:, 1:], 2, axis=1)
        # Chan et al., 1983. E[x²] − E[x]² would subtract large numbers and lose digits.
        total = tf.reduce_sum(counts)
        # As Keras divides.
        total = tf.maximum(total, 1) if mask is None else total + keras.config.epsilon()
        mean = tf.reduce_sum(counts * means, axis=0) / total
        spread = counts * tf.square(means - mean)
        variance = tf.reduce_sum(squares + spread, axis=0) / total
        return (
            tf.cast(tf.reshape(mean, shape), inputs.dtype),
            tf.cast(tf.reshape(variance, shape), inputs.dtype),
        )


def _is_global(layer: Any, rule: str) -> bool:
    is_own = layer.synchronized or isinstance(layer, GlobalMoments)
    return is_own or rule == "global"


def _layers(model: Any) -> list[Any]:
    layers = private.layers_of(model, include_self=False)
    kind = keras.layers.BatchNormalization
    return [layer for layer in layers if isinstance(layer, kind)]


def _own_moments(inputs: Any, mask: Any, axes: Any) -> tuple[Any, Any, Any]:
    """Count, mean and sum of squared distances of this rank's values, in float32.

    Values in float64 stay in float64.
    """
    x = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
    if mask is None:
        weights = tf.ones_like(x)
    else:
        is_counted = tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(x))
        x, weights = tf.where(is_counted, x, 0), tf.cast(is_counted, x.dtype)
    counts = tf.reduce_sum(weights, axes)
    mean = tf.math.divide_no_nan(tf.reduce_sum(x * weights, axes), counts)
    shape = [1 if axis in axes else size for axis, size in enumerate(inputs.shape)]
    distance = (x - tf.reshape(mean, shape)) * weights
    squares = tf.reduce_sum(tf.square(distance), axes)
    return tf.reduce_max(counts), mean, squares


@tf.custom_gradient
def _gather(own: Any) -> Any:
    """Gather the vectors of all ranks as rows of a matrix, with its gradient."""
    context = step_context.current()
    name = comm.name_of("moments")
    everyone = comm.gather_rows(own[tf.newaxis], name=name, equal_rows=True)

    def gradient(upstream: Any) -> Any:
        # The gradients of weights are averaged by rows later, which multiplies them by
        # this rank's rows. So the other ranks' gradients of this rank's values are
        # multiplied by their rows here, and the sum is divided by this rank's. If each
        # rank's loss was multiplied by its fraction of the rows, nothing is left to do.
        is_done = context.rows is None or bool(context.weighted)
        is_done |= context.is_sum_next("apply")
        weight = tf.cast(1 if is_done else context.rows, upstream.dtype)
        total = comm.total(upstream * weight, purpose="moments_gradient")
        return tf.math.divide_no_nan(total[comm.rank()], weight)

    return everyone, gradient
