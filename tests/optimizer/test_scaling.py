"""Scaling of rates and steps: what is refused; steps on every small number."""

import math

import pytest

from keras_dist.data.steps import find_step_multiplier, scale_steps
from keras_dist.optimizer.rate import rate_factor


def test_unusable_factors_are_refused():
    """Not positive, not finite, not a number, not a rule."""
    for rule in (0, -1, math.nan, math.inf, True, None, [2], "double"):
        with pytest.raises(ValueError, match="Received: "):
            rate_factor(rule, size=2)
    with pytest.raises(ValueError, match="gave 'much' for 2"):
        rate_factor(lambda size: "much", size=2)


def test_divided_steps_are_rounded_up():
    """The ranks together read every row of one process, and make no step more."""
    for size in range(1, 9):
        for steps in range(1, 100):
            own = scale_steps("divide", steps, size=size)
            assert (own - 1) * size < steps <= own * size
            assert scale_steps("none", steps, size=size) == steps
            assert scale_steps(lambda s, n: s + n, steps, size=size) == (steps + size)
            oversampled = scale_steps(3, steps, size=size, multiples=True)
            assert oversampled == math.ceil(3 * steps / size)
    assert scale_steps(0.1, 30, size=1, multiples=True) == 3
    assert scale_steps("divide", None, size=2) is None


def test_unusable_steps_are_refused():
    """By name, with what was received; a factor only where one is meant."""
    for rule in ("half", 2, None, 0.5):
        with pytest.raises(ValueError, match="`steps_scaling` must be"):
            scale_steps(rule, 10, size=2)
    for rule in (0, -1, math.inf, "half"):
        with pytest.raises(ValueError, match="a positive number, or a function"):
            scale_steps(rule, 10, size=2, multiples=True)
    for steps in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="at least 1"):
            scale_steps("divide", steps, size=2)
    for result in (0, 1.5, None):
        with pytest.raises(ValueError, match="must give a whole number"):
            scale_steps(lambda s, n, result=result: result, 10, size=2)


def test_the_step_multiplier_is_the_size_only_if_steps_are_divided():
    """With the other rules an epoch keeps its number of steps."""
    assert find_step_multiplier("divide", size=4) == 4
    assert find_step_multiplier("none", size=4) == 1
    assert find_step_multiplier(lambda steps, size: steps, size=4) == 1
