"""Tell where a model trains by Keras's own code alone."""

from typing import Any

import keras

# Losses of Keras that are one number for the whole batch, whatever its reduction.
_OF_WHOLE_BATCH = (keras.losses.Dice, keras.losses.Tversky)


def is_mean_of_keras(loss: Any) -> bool:
    """Whether a loss is Keras's own, and has a value for each row before it is reduced.

    Args:
        loss: A `keras.losses.Loss`, a name or a function, as `compile` takes it.
    """
    of = getattr(loss, "fn", loss)
    owner = of if isinstance(of, type) or hasattr(of, "__name__") else type(of)
    is_keras = isinstance(loss, str) or owner.__module__.startswith("keras.")
    return is_keras and not isinstance(loss, _OF_WHOLE_BATCH)


def is_all_of_keras(model: Any, ours: type) -> bool:
    """Whether Keras's own code alone computes the losses of a model and its layers.

    Args:
        model: A compiled model.
        ours: The mixin of this package, whose methods are ignored.
    """
    methods = ("call", "compute_loss", "train_step")
    return (
        all(definer(model, name, ours).startswith("keras.") for name in methods)
        and all(
            type(layer).__module__.startswith("keras.")
            for layer in model._flatten_layers(include_self=False)
        )
        and all(map(is_mean_of_keras, keras.tree.flatten(getattr(model, "loss", None))))
    )


def is_keras_path_to_update(model: Any, ours: type) -> bool:
    """Whether Keras's own code alone computes the update from the loss.

    Args:
        model: A compiled model.
        ours: The mixin of this package, whose methods are ignored.
    """
    return all(
        definer(found, name, ours).startswith("keras.")
        for found, name in ((model, "train_step"), (model.optimizer, "apply_gradients"))
    )


def definer(found: Any, name: str, ours: type) -> str:
    """The module of the class that defines a method."""
    for cls in type(found).__mro__:
        if name in vars(cls) and cls is not ours:
            return cls.__module__
    return ""
