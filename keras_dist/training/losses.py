"""Make the loss of one rank's rows its part of the loss of the global batch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm
from keras_dist.optimizer import step_context


@contextlib.contextmanager
def of_all_rows() -> Iterator[None]:
    """Inside the block, the row-weighted mean of losses is that of the global batch.

    Nothing has to be done for a loss that is a mean over its rows. A loss that adds up
    its rows, or divides by the number of unmasked elements or by the sum of the sample
    weights, is multiplied by a factor: the rank's fraction of that divisor over its
    fraction of the rows.

    Keras's own train step and those of users all call `keras.losses.Loss.__call__`, so
    it is this method that is replaced.
    """
    plain = keras.losses.Loss.__call__

    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = plain(loss, y_true, y_pred, sample_weight)
        mask = getattr(y_pred, "_keras_mask", None)
        factor = _factor(loss.reduction, mask, sample_weight)
        return value if factor is None else value * tf.cast(factor, value.dtype)

    keras.losses.Loss.__call__ = call
    try:
        yield
    finally:
        keras.losses.Loss.__call__ = plain


def _factor(reduction: Any, mask: Any, sample_weight: Any) -> Any:
    context = step_context.current()
    if context.rows is None:
        return None
    if reduction == "sum":
        return 1 / context.row_fraction(tf.float32)
    if reduction in ("sum_over_batch_size", "mean") and mask is not None:
        divisor = tf.reduce_sum(tf.cast(mask, tf.float32))
    elif reduction == "mean_with_sample_weight" and sample_weight is not None:
        weight = tf.cast(sample_weight, tf.float32)
        if mask is not None:
            weight *= tf.cast(tf.reshape(mask, tf.shape(weight)), tf.float32)
        divisor = tf.reduce_sum(weight)
    else:
        return None
    part = tf.math.divide_no_nan(divisor, comm.total(divisor, purpose="losses"))
    return part / context.row_fraction(tf.float32)


def is_keras_path_to_update(model: Any, ours: type) -> bool:
    """Whether Keras's own code alone computes the update from the loss.

    Args:
        model: A compiled model.
        ours: The mixin of this package, whose methods are ignored.
    """
    return all(
        _definer(found, name, ours).startswith("keras.")
        for found, name in ((model, "train_step"), (model.optimizer, "apply_gradients"))
    )


def _definer(found: Any, name: str, ours: type) -> str:
    """The module of the class that defines a method."""
    for cls in type(found).__mro__:
        if name in vars(cls) and cls is not ours:
            return cls.__module__
    return ""
