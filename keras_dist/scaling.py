"""Scale learning rates and steps with the number of ranks: arithmetic only."""

import math
from collections.abc import Callable
from typing import Any

LearningRateRule = str | float | Callable[[int], float]
StepsRule = str | float | Callable[[int, int], int]


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
    if not _is_number(value):
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


def scaled_steps(
    rule: StepsRule,
    steps: int | None,
    *,
    size: int,
    name: str = "steps_scaling",
    multiples: bool = False,
) -> int | None:
    """Steps of each rank, if a script for one process asks for `steps` steps.

    Args:
        rule: `"divide"` to divide by the number of ranks and round up; `"none"` to
            leave `steps` as it is; or a function of (steps, size).
        steps: Steps that the script asks for, or `None` for all of the data.
        size: Number of ranks, at least 1.
        name: Name of the rule's argument, for errors.
        multiples: Whether `rule` may also be a positive number m, for m × steps / size,
            rounded up.

    Returns:
        A number of at least 1, or `None` if `steps` is `None`.

    Raises:
        ValueError: If the rule is unknown, or `steps` or the result is not a
            positive whole number.

    >>> scaled_steps("divide", 100, size=3)
    34
    >>> scaled_steps(3, 100, size=4, multiples=True)
    75
    """
    factor: Any = None
    if isinstance(rule, str):
        factor = {"divide": 1, "none": size}.get(rule)
    if multiples and _is_number(rule):
        factor = rule
    if not callable(rule) and (factor is None or not 0 < factor < math.inf):
        raise ValueError(
            f'`{name}` must be "divide", "none", '
            + ("a positive number, " if multiples else "")
            + f"or a function of (steps, size). Received: {name}={rule!r}"
        )
    if steps is None:
        return None
    if not _is_whole(steps) or steps < 1:
        raise ValueError(
            "A number of steps must be a whole number of at least 1, or None for "
            f"all of the data. Received: {steps!r} for {name}."
        )
    result = rule(steps, size) if callable(rule) else _ceil(factor * steps, size)
    if not _is_whole(result) or result < 1:
        raise ValueError(
            f"`{name}` must give a whole number of at least 1. "
            f"Received: {result!r} for steps={steps}, size={size}."
        )
    return int(result)


def step_multiplier(rule: StepsRule, *, size: int) -> int:
    """Steps of one process that correspond to one step of `size` ranks.

    A `LearningRateSchedule` is a function of the step. If the steps of an epoch are
    divided by the number of ranks, the schedule is read at step × `size`, so that it
    has the same value at the same epoch.
    """
    return size if rule == "divide" else 1


def _ceil(value: float, size: int) -> int:
    # 0.1 × 30 is slightly more than 3 in floating point, and must not become 4.
    return math.ceil(round(value / size, 9))


def _is_number(value: Any) -> bool:
    return not isinstance(value, (bool, str)) and hasattr(value, "__float__")


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")
