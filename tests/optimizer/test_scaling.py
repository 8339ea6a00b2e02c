"""Scaling of rates and steps: what is refused; steps on every small number."""

import math

import pytest

from keras_dist.data.division import scale_steps
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
    assert scale_steps("divide", None, size=2) is None


def test_unusable_steps_are_refused():
    """With what was received."""
    for steps in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="at least 1"):
            scale_steps("divide", steps, size=2)
