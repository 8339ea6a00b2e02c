"""Which optimizers there are: on a model, and one inside another."""

from typing import Any

import keras


def optimizers_of(model: Any) -> list[Any]:
    """The compiled optimizer, and those that a custom train step keeps on `model`."""
    return [
        value
        for value in {id(v): v for v in vars(model).values()}.values()
        if isinstance(value, keras.optimizers.Optimizer)
    ]


def parts(optimizer: Any) -> list[Any]:
    """`optimizer` and those inside it (of a `LossScaleOptimizer`), outermost first."""
    found = [optimizer]
    while (inner := getattr(found[-1], "inner_optimizer", None)) is not None:
        found.append(inner)
    return found
