"""Rules for the number of steps of an epoch."""

import math
from collections.abc import Callable
from typing import Any, Literal

StepsRule = Literal["auto", "divide", "none"] | Callable[[int, int], int]


def scale_steps(
    rule: StepsRule | float,
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

    >>> scale_steps("divide", 100, size=3)
    34
    >>> scale_steps(3, 100, size=4, multiples=True)
    75
    """
    factor: Any = None
    if isinstance(rule, str):
        factor = {"divide": 1, "none": size}.get(rule)
    if multiples and is_number(rule):
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


def find_step_multiplier(rule: StepsRule, *, size: int) -> int:
    """Steps of one process that correspond to one step of `size` ranks.

    A `LearningRateSchedule` is a function of the step. If the steps of an epoch are
    divided by the number of ranks, the schedule is read at step × `size`, so that it
    has the same value at the same epoch.
    """
    return size if rule == "divide" else 1


def _ceil(value: float, size: int) -> int:
    # 0.1 × 30 is slightly more than 3 in floating point, and must not become 4.
    return math.ceil(round(value / size, 9))


def is_number(value: Any) -> bool:
    """Return True if `value` is a number of any library, and no `bool`."""
    return not isinstance(value, (bool, str)) and hasattr(value, "__float__")


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")
