"""Check that a model can be trained on many ranks."""

from typing import Any

import keras
import tensorflow as tf

from keras_dist import optimizer, private
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
    strategy = _strategy_of(model)
    if strategy is not None:
        raise ValueError(
            "The model is already distributed by TensorFlow. Received: a model under "
            f"{type(strategy).__name__}. Create and compile it "
            "outside of `strategy.scope()`: keras_dist starts one process per device "
            "instead."
        )


def check_local_layers(model: Any, averaging: optimizer.Averaging) -> None:
    """Raise a `ValueError` if one of `local_layers` is not a layer of `model`."""
    known = {id(layer) for layer in private.layers_of(model, include_self=False)}
    for layer in averaging.local_layers:
        if id(layer) not in known:
            raise ValueError(
                "`local_layers` must be layers of the model. "
                f"Received: {layer!r}, which {model.name!r} does not have."
            )


def _strategy_of(model: Any) -> Any:
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
