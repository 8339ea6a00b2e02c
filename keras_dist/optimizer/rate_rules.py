"""Rules for the learning rate: its factor, and the warm-up of that factor."""

import math
from collections.abc import Callable
from typing import Any

from keras_dist.data.steps import is_number

LearningRateRule = str | float | Callable[[int], float]


def rate_factor(rule: LearningRateRule, *, size: int) -> float:
    """Factor on the learning rate for `size` ranks.

    With `"linear"`, each row changes the weights as much as in the smaller batch of one
    process (Goyal et al., 2017, https://arxiv.org/abs/1706.02677). With `"sqrt"`, the
    variance of the weight updates stays the same (Krizhevsky, 2014,
    https://arxiv.org/abs/1404.5997).

    Args:
        rule: `"linear"`, `"sqrt"`, `"none"`, a positive number, or a function of
            `size` that returns one.
        size: Number of ranks, at least 1.

    Returns:
        The factor, a positive finite number.

    Raises:
        ValueError: If the rule is unknown or the factor is not positive and finite.

    >>> [rate_factor(rule, size=4) for rule in ("linear", "sqrt", "none", 3)]
    [4.0, 2.0, 1.0, 3.0]
    >>> rate_factor(lambda size: size / 2, size=4)
    2.0
    """
    named = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}
    value: Any = rule
    if isinstance(rule, str):
        value = named.get(rule)
    elif callable(rule):
        value = rule(size)
    if not is_number(value):
        raise ValueError(
            '`lr_scaling` must be "linear", "sqrt", "none", a positive number, or a '
            f"function of the number of ranks that returns one. Received: {rule!r}"
            + ("" if isinstance(rule, str) else f", which gave {value!r} for {size}")
        )
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(
            "The factor on the learning rate must be positive and finite. "
            f"Received: lr_scaling={rule!r}, which gave {value} for {size} ranks."
        )
    return float(value)


def warmup_factor(step: float, *, warmup_steps: int, full: float) -> float:
    """Factor on the learning rate at `step`: a straight line from 1 to `full`.

    Goyal et al., 2017, section 2.2 (https://arxiv.org/abs/1706.02677).

    Args:
        step: Updates made so far, 0 at the first one.
        warmup_steps: Updates until the full factor is reached; 0 for no warm-up.
        full: The factor after the warm-up.

    >>> [warmup_factor(step, warmup_steps=4, full=8.0) for step in (0, 2, 4, 99)]
    [1.0, 4.5, 8.0, 8.0]
    >>> warmup_factor(0, warmup_steps=0, full=8.0)
    8.0
    """
    if warmup_steps <= 0:
        return full
    return 1.0 + (full - 1.0) * min(step / warmup_steps, 1.0)
