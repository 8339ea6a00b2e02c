"""The learning rate: rules for its factor, and the scaled rate inside an update."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import keras

from keras_dist import comm, mixin, private
from keras_dist.optimizer.nested import leaves, leaves_of

LearningRateRule = Literal["linear", "sqrt", "none"] | float | Callable[[int], float]

_LOGGED = "effective_learning_rate"


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
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
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


def warmup_factor(step: Any, *, warmup_steps: int, full: float) -> Any:
    """Factor on the learning rate at `step`: a straight line from 1 to `full`.

    Goyal et al., 2017, section 2.2 (https://arxiv.org/abs/1706.02677).

    Args:
        step: Updates made so far, 0 at the first one; a number or a tensor.
        warmup_steps: Updates until the full factor is reached; 0 for no warm-up.
        full: The factor after the warm-up.

    >>> [warmup_factor(step, warmup_steps=4, full=8.0) for step in (0, 2, 4, 99)]
    [1.0, 4.5, 8.0, 8.0]
    >>> warmup_factor(0, warmup_steps=0, full=8.0)
    8.0
    """
    if warmup_steps <= 0 or full == 1.0:
        return full
    if isinstance(step, (int, float)):
        return 1.0 + (full - 1.0) * min(step / warmup_steps, 1.0)
    progress = keras.ops.cast(step, "float32") / warmup_steps  # in a compiled update
    return 1.0 + (full - 1.0) * keras.ops.minimum(progress, 1.0)


def count_warmup_steps(warmup_epochs: float, steps: int | None) -> int:
    """Count the steps of a warm-up; `steps` are those of an epoch, `None` if unknown.

    Raises:
        ValueError: If `warmup_epochs` is negative, or the steps are unknown.
    """
    if warmup_epochs < 0:
        raise ValueError(
            "`warmup_epochs` must not be negative. "
            f"Received: warmup_epochs={warmup_epochs}"
        )
    if warmup_epochs and steps is None:
        raise ValueError(
            "A warm-up in epochs needs the number of steps of an epoch, which is not "
            f"known. Received: warmup_epochs={warmup_epochs} and data of unknown "
            "length. Pass `steps_per_epoch` to fit, or to LearningRateWarmup."
        )
    return round(warmup_epochs * (steps or 0))


@dataclass
class _Rate:
    """The state of an optimizer whose learning rate is scaled."""

    full: float = 1.0
    warmup_steps: int = 0
    step_multiplier: int = 1
    is_updating: bool = False
    # After a resume with another number of ranks: added to steps, and to batches.
    offset: int = 0
    ahead: float = 0

    def factor(self, step: Any) -> Any:
        return warmup_factor(step, warmup_steps=self.warmup_steps, full=self.full)


def scale_rate(
    optimizer: Any, full: float, warmup_steps: int = 0, step_multiplier: int = 1
) -> None:
    """Make updates use rate × `warmup_factor`, and schedules step × `step_multiplier`.

    The factor applies only inside the update. Otherwise `optimizer.learning_rate` is
    the unscaled rate, so that callbacks that read and set it, and checkpoints, never
    scale it twice.

    Args:
        optimizer: A Keras optimizer, built if it is a `MultiOptimizer`.
        full: The factor after the warm-up.
        warmup_steps: Updates until it is reached.
        step_multiplier: Steps of one process that one step here stands for.
    """
    for leaf in leaves(optimizer):
        state = replace(_state(leaf))  # with what a resume has restored
        state.full, state.warmup_steps = full, warmup_steps
        state.step_multiplier = step_multiplier
        object.__setattr__(leaf, "_rate", state)
        mixin.add(leaf, ScalesRate)


def _state(leaf: Any) -> _Rate:
    return leaf._rate if mixin.has(leaf, ScalesRate) else _Rate()


def rate_progress(leaf: Any) -> dict[str, float]:
    """Return how far the learning rate of an optimizer has come.

    Args:
        leaf: An optimizer without others inside.

    Returns:
        Steps and batches of one process, and the unscaled rate.
    """
    state = _state(leaf)
    steps, batches = _counts(leaf)
    return {
        "steps": steps * state.step_multiplier + state.offset,
        "batches": batches + state.ahead,
        "rate": float(comm.to_array(leaf.learning_rate)),
    }


def restore_rate_progress(leaf: Any, progress: dict[str, float], warmup: float) -> None:
    """Continue the learning rate after a resume with another number of ranks.

    Args:
        leaf: An optimizer with the iterations of the checkpoint, whose rate is scaled
            for the number of ranks of now.
        progress: The `rate_progress` that was saved; its `steps` count steps of one
            process.
        warmup: Warm-up steps now, divided by the checkpoint's warm-up steps.
    """
    state = _state(leaf)
    steps, batches = _counts(leaf)
    state.offset = int(progress["steps"]) - steps * state.step_multiplier
    state.ahead = progress["batches"] * warmup - batches
    if state.offset or state.ahead:
        object.__setattr__(leaf, "_rate", state)
        mixin.add(leaf, ScalesRate)


def _counts(leaf: Any) -> tuple[int, int]:
    """Steps, and batches as warm-up counts them."""
    updates = int(comm.to_array(leaf.iterations))
    steps = int(comm.to_array(private.batches_of(leaf)))
    return steps, updates * (leaf.gradient_accumulation_steps or 1)


def effective_rate(leaf: Any) -> float:
    """Return the learning rate of the last update: rate × factor, at its step.

    Args:
        leaf: An optimizer without others inside. Before its first update, the result
            is the rate of that update.
    """
    state = _state(leaf)
    batches = leaf.gradient_accumulation_steps or 1
    updates = int(comm.to_array(leaf.iterations))
    schedule = schedule_of(leaf)
    if schedule is None:
        rate = leaf.learning_rate
    else:
        rate = schedule(
            max(updates * batches - 1, 0) * state.step_multiplier + state.offset
        )
    before = max(updates - 1, 0) * batches + state.ahead
    return float(comm.to_array(rate)) * state.factor(before)


def effective_rates(model: Any) -> dict[str, float]:
    """Return the rate that the last update of each optimizer used, by a name for logs.

    Args:
        model: A compiled model. With several optimizers in it, the name of each one is
            appended to the key, as in Keras.
    """
    found = leaves_of(model)
    return {
        f"{_LOGGED}_{leaf.name}" if len(found) > 1 else _LOGGED: effective_rate(leaf)
        for leaf in found
    }


def schedule_of(leaf: Any) -> Any:
    """Return the `LearningRateSchedule` of an optimizer, or `None`."""
    rate = private.rate_of(leaf)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return rate if is_schedule else None


class ScalesRate:
    """Mixin for a leaf: inside `apply`, `learning_rate` is the scaled rate."""

    _rate: _Rate

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        with mixin.change(self._rate, is_updating=True):
            return super().apply(*args, **kwargs)  # type: ignore[misc]

    @property
    def learning_rate(self) -> Any:
        rate = super().learning_rate  # type: ignore[misc]
        schedule, state = schedule_of(self), self._rate
        if (state.step_multiplier != 1 or state.offset) and schedule is not None:
            step = private.batches_of(self) * state.step_multiplier
            rate = schedule(step + state.offset)
        if not state.is_updating or state.full == 1.0:
            return rate
        # `iterations` counts updates; warm-up counts batches, as Keras's schedules do.
        batches = self.iterations * (self.gradient_accumulation_steps or 1)  # type: ignore[attr-defined]
        if state.ahead:
            batches = keras.ops.cast(batches, "float32") + state.ahead
        scale = state.factor(batches)
        return rate * keras.ops.cast(scale, keras.ops.convert_to_tensor(rate).dtype)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        super(ScalesRate, type(self)).learning_rate.fset(self, value)  # type: ignore[misc]
