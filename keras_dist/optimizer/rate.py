"""The scaled learning rate, which exists only inside an update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from keras_dist import mixin
from keras_dist.optimizer.parts import leaves


@dataclass
class _Rate:
    """What an optimizer whose rate is scaled remembers."""

    factor: Callable[[Any], Any] | None  # of the step; `None` for 1
    stretch: int
    is_updating: bool = False


def scale_rate(
    optimizer: Any, factor: Callable[[Any], Any] | None, *, stretch: int = 1
) -> None:
    """Let updates see the learning rate × `factor`, and schedules step × `stretch`.

    Only inside the update: at all other times `optimizer.learning_rate` is the plain
    rate, so that callbacks which read and set it, and checkpoints, never scale twice.

    Args:
        optimizer: A Keras optimizer, built if it is a `MultiOptimizer`.
        factor: Factor as a function of the step (an integer tensor), or `None` for 1.
        stretch: Steps of one process that one step here stands for.
    """
    for leaf in leaves(optimizer):
        object.__setattr__(leaf, "_rate", _Rate(factor, stretch))
        mixin.add(leaf, ScalesRate)


def unscale_rate(optimizer: Any) -> None:
    """Take `scale_rate` back."""
    for leaf in leaves(optimizer):
        mixin.remove(leaf, ScalesRate)


def effective_rate(leaf: Any) -> float:
    """The learning rate that the last update saw: rate × factor, at its step.

    Args:
        leaf: An optimizer that holds no other ones. Before its first update, the rate
            that this one is going to see.
    """
    state = leaf._rate if mixin.has(leaf, ScalesRate) else _Rate(None, 1)
    batches = leaf.gradient_accumulation_steps or 1
    updates = int(keras.ops.convert_to_numpy(leaf.iterations))
    schedule = schedule_of(leaf)
    if schedule is None:
        rate = leaf.learning_rate
    else:
        rate = schedule(max(updates * batches - 1, 0) * state.stretch)
    before = max(updates - 1, 0) * batches
    factor = 1.0 if state.factor is None else state.factor(before)
    return float(keras.ops.convert_to_numpy(rate)) * float(factor)


def schedule_of(leaf: Any) -> Any:
    """The `LearningRateSchedule` of an optimizer, or `None` where it has a number."""
    rate = getattr(leaf, "_learning_rate", None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return rate if is_schedule else None


class ScalesRate:
    """Mixin for a leaf: the scaled rate lives inside `apply`."""

    _rate: _Rate

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        self._rate.is_updating = True
        try:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        finally:
            self._rate.is_updating = False

    @property
    def learning_rate(self) -> Any:
        rate = super().learning_rate  # type: ignore[misc]
        schedule = schedule_of(self)
        stretch, factor = self._rate.stretch, self._rate.factor
        if stretch != 1 and schedule is not None:
            rate = schedule(self._iterations * stretch)  # type: ignore[attr-defined]
        if not self._rate.is_updating or factor is None:
            return rate
        # `iterations` counts updates; warm-up counts batches, as Keras's schedules do.
        batches = self.iterations * (self.gradient_accumulation_steps or 1)  # type: ignore[attr-defined]
        scale = factor(batches)
        return rate * keras.ops.cast(scale, keras.ops.convert_to_tensor(rate).dtype)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        super(ScalesRate, type(self)).learning_rate.fset(self, value)  # type: ignore[attr-defined,misc]
