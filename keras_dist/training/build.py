"""Build the model, its metrics and its optimizer before the first step."""

import warnings
from typing import Any

from keras_dist.optimizer import nested_optimizers, optimizers_of


def build(model: Any, data: Any) -> None:
    """Make all variables of the model, its metrics and its optimizer.

    They must exist before the first step: weights and optimizer state are copied to all
    ranks then, and code that XLA compiles cannot make variables.
    """
    try:
        model._symbolic_build(data_batch=data)
    except Exception as error:
        # A model that cannot be called on symbolic tensors is built when it is called.
        if not model.built:
            warnings.warn(
                f"{type(model).__name__} could not be built from the shapes of its "
                f"first batch ({type(error).__name__}: {error}). Build it before the "
                "fit, for example by calling it on one batch.",
                stacklevel=2,
            )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and model.built:
        optimizer.build(model.trainable_variables)


def holds_unbuilt_optimizers(model: Any) -> bool:
    """Whether an optimizer holds others that it may make only when it is built."""
    return any(
        hasattr(part, "optimizers")
        for found in optimizers_of(model)
        for part in nested_optimizers(found)
    )
