"""Find optimizers: those of a model, and those inside another one."""

from typing import Any

import keras


def optimizers_of(model: Any) -> list[Any]:
    """The compiled optimizer, and others that are attributes of `model`."""
    return [
        value
        for value in {id(v): v for v in vars(model).values()}.values()
        if isinstance(value, keras.optimizers.Optimizer)
    ]


def leaves(optimizer: Any) -> list[Any]:
    """The innermost optimizers, which update variables and have a learning rate.

    A `LossScaleOptimizer` has one inside, and a `MultiOptimizer` several, which it may
    make only when it is built. Every other optimizer is its own leaf.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return leaves(inner)
    # Keras has it from 3.14 on.
    multi = getattr(keras.optimizers, "MultiOptimizer", ())
    return list(optimizer.optimizers) if isinstance(optimizer, multi) else [optimizer]


def nested_optimizers(optimizer: Any) -> list[Any]:
    """`optimizer` and those inside it (of a `LossScaleOptimizer`), outermost first."""
    found = [optimizer]
    while (inner := getattr(found[-1], "inner_optimizer", None)) is not None:
        found.append(inner)
    return found
