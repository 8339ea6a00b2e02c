"""Scaling of rates and steps: formulas, tried on every small number."""

import math

import pytest

from keras_dist.data.steps import find_step_multiplier, scale_steps
from keras_dist.optimizer.rate import rate_factor, warmup_factor


def test_named_rules_are_their_formulas():
    """Linear, square root and none, for every size up to 64."""
    for size in range(1, 65):
        assert rate_factor("linear", size=size) == size
        assert rate_factor("sqrt", size=size) ** 2 == pytest.approx(size)
        assert rate_factor("none", size=size) == 1.0
        assert rate_factor(0.5, size=size) == 0.5
        assert rate_factor(lambda n: n + 1, size=size) == size + 1


def test_unusable_factors_are_refused():
    """Not positive, not finite, not a number, not a rule."""
    for rule in (0, -1, math.nan, math.inf, True, None, [2], "double"):
        with pytest.raises(ValueError, match="Received: "):
            rate_factor(rule, size=2)
    with pytest.raises(ValueError, match="gave 'much' for 2"):
        rate_factor(lambda size: "much", size=2)


def test_warmup_is_a_straight_line_from_one():
    """It begins at 1, ends at the full factor, rises by equal parts, stays."""
    for full in (0.5, 1.0, 2.0, 7.0):
        for steps in range(1, 12):
            line = [
                warmup_factor(step, warmup_steps=steps, full=full)
                for step in range(steps + 3)
            ]
            assert line[0] == 1.0
            assert line[steps:] == pytest.approx([full] * 3)
            for before, after in zip(line[:steps], line[1 : steps + 1], strict=True):
                assert after - before == pytest.approx((full - 1) / steps)


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
