"""Check that a model can be trained on many ranks."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import optimizer
from keras_dist.setup.arguments import Options
from keras_dist.training.autotune import plain_strategy


def check_model(model: Any, *, is_compiled: bool = True) -> None:
    """Raise an error if `model` cannot be used on many ranks.

    Args:
        model: What the user passed as the model.
        is_compiled: Whether it must be compiled.

    Raises:
        TypeError: If it is not a Keras model.
        ValueError: If it is not compiled, or uses a `tf.distribute` strategy.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model. "
            f"Received: {model!r} of type {type(model).__name__}"
        )
    if is_compiled and not model.compiled:
        raise ValueError(
            "The model must be compiled: its optimizer averages the gradients. "
            f"Received: the uncompiled model {model.name!r}. Call model.compile(…) "
            "first."
        )
    strategy = _find_strategy(model)
    if strategy is not None:
        raise ValueError(
            "The model is already distributed by TensorFlow. Received: a model under "
            f"{type(strategy).__name__}. Create and compile it "
            "outside of `strategy.scope()`: keras_dist starts one process per device "
            "instead."
        )


def check_averaging(averaging: Sequence[optimizer.Averaging], options: Options) -> None:
    """Raise a `ValueError` if gradients of shared batches would be added up.

    Args:
        averaging: How the gradients of each optimizer are averaged.
        options: The options of the fit.
    """
    is_sum = any(each.op != "average" for each in averaging)
    if options.batch == "global" and is_sum:
        raise ValueError(
            'batch="global" gives the model of one process, and a sum of gradients '
            'depends on the number of ranks. Received: batch="global" and an optimizer '
            'made by DistributedOptimizer(…, op="sum"). Leave one out.'
        )


def _find_strategy(model: Any) -> Any:
    """Find the `tf.distribute.Strategy` around this call or of anything in `model`.

    The scope may have been around the compilation alone, or around a layer.
    """
    if tf.distribute.has_strategy():
        return tf.distribute.get_strategy()
    if plain_strategy(model) is not tf.distribute.get_strategy():
        return plain_strategy(model)
    variables = list(model.variables)
    for found in optimizer.optimizers_of(model):
        variables += found.variables
    for variable in variables:
        value = getattr(variable, "value", None)
        if isinstance(value, tf.distribute.DistributedValues):
            return value.distribute_strategy
    return None
