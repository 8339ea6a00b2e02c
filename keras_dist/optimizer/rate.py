"""The scaled learning rate, which is used only inside an update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from keras_dist import mixin
from keras_dist.optimizer.nested import leaves, optimizers_of

_LOGGED = "effective_learning_rate"


@dataclass
class _Rate:
    """The state of an optimizer whose learning rate is scaled."""

    factor: Callable[[Any], Any] | None  # of the step; `None` for 1
    step_multiplier: int
    is_updating: bool = False
    # After a resume with another number of ranks: added to steps, and to batches.
    offset: int = 0
    ahead: float = 0


def scale_rate(
    optimizer: Any, factor: Callable[[Any], Any] | None, *, step_multiplier: int = 1
) -> None:
    """Make updates use rate × `factor`, and schedules step × `step_multiplier`.

    The factor applies only inside the update. Otherwise `optimizer.learning_rate` is
    the unscaled rate, so that callbacks that read and set it, and checkpoints, never
    scale it twice.

    Args:
        optimizer: A Keras optimizer, built if it is a `MultiOptimizer`.
        factor: Factor as a function of the step (an integer tensor), or `None` for 1.
        step_multiplier: Steps of one process that one step here stands for.
    """
    for leaf in leaves(optimizer):
        object.__setattr__(leaf, "_rate", _Rate(factor, step_multiplier))
        mixin.add(leaf, ScalesRate)


def unscale_rate(optimizer: Any) -> None:
    """Undo `scale_rate`."""
    for leaf in leaves(optimizer):
        mixin.remove(leaf, ScalesRate)


def rate_progress(leaf: Any) -> dict[str, float]:
    """How far the learning rate of an optimizer has come.

    Args:
        leaf: An optimizer without others inside.

    Returns:
        Steps and batches of one process, and how many of these batches were added by
        `restore_rate_progress`.
    """
    state = leaf._rate if mixin.has(leaf, ScalesRate) else _Rate(None, 1)
    steps, batches = _counts(leaf)
    return {
        "steps": steps * state.step_multiplier + state.offset,
        "batches": batches + state.ahead,
        "ahead": state.ahead,
    }


def restore_rate_progress(leaf: Any, progress: dict[str, float], warmup: float) -> None:
    """Continue the learning rate after a resume with another number of ranks.

    Args:
        leaf: An optimizer with the iterations of the checkpoint, whose rate is scaled
            for the number of ranks of now.
        progress: The `rate_progress` that was saved; its `steps` are those of one
            process.
        warmup: Warm-up steps now, divided by those of the checkpoint.
    """
    state = leaf._rate if mixin.has(leaf, ScalesRate) else _Rate(None, 1)
    steps, batches = _counts(leaf)
    state.offset = int(progress["steps"]) - steps * state.step_multiplier
    state.ahead = progress["ahead"]
    if warmup != 1:
        state.ahead = progress["batches"] * warmup - batches
    if state.offset or state.ahead:
        object.__setattr__(leaf, "_rate", state)
        mixin.add(leaf, ScalesRate)


def _counts(leaf: Any) -> tuple[int, int]:
    """Steps, and batches as warm-up counts them."""
    updates = int(keras.ops.convert_to_numpy(leaf.iterations))
    steps = int(keras.ops.convert_to_numpy(leaf._iterations))
    return steps, updates * (leaf.gradient_accumulation_steps or 1)


def effective_rate(leaf: Any) -> float:
    """The learning rate that the last update saw: rate × factor, at its step.

    Args:
        leaf: An optimizer without others inside. Before its first update, the result
            is the rate of that update.
    """
    state = leaf._rate if mixin.has(leaf, ScalesRate) else _Rate(None, 1)
    batches = leaf.gradient_accumulation_steps or 1
    updates = int(keras.ops.convert_to_numpy(leaf.iterations))
    schedule = schedule_of(leaf)
    if schedule is None:
        rate = leaf.learning_rate
    else:
        rate = schedule(
            max(updates * batches - 1, 0) * state.step_multiplier + state.offset
        )
    before = max(updates - 1, 0) * batches + state.ahead
    factor = 1.0 if state.factor is None else state.factor(before)
    return float(keras.ops.convert_to_numpy(rate)) * float(factor)


def effective_rates(model: Any) -> dict[str, float]:
    """Return the rate that the last update of each optimizer used, by a name for logs.

    Args:
        model: A compiled model. With several optimizers in it, the name of each one is
            appended to the key, as in Keras.
    """
    found = [leaf for one in optimizers_of(model) for leaf in leaves(one)]
    return {
        f"{_LOGGED}_{leaf.name}" if len(found) > 1 else _LOGGED: effective_rate(leaf)
        for leaf in found
    }


def schedule_of(leaf: Any) -> Any:
    """The `LearningRateSchedule` of an optimizer, or `None` if its rate is a number."""
    rate = getattr(leaf, "_learning_rate", None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return rate if is_schedule else None


class ScalesRate:
    """Mixin for a leaf: inside `apply`, `learning_rate` is the scaled rate."""

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
        step_multiplier, factor = self._rate.step_multiplier, self._rate.factor
        offset, ahead = self._rate.offset, self._rate.ahead
        if (step_multiplier != 1 or offset) and schedule is not None:
            rate = schedule(self._iterations * step_multiplier + offset)  # type: ignore[attr-defined]
        if not self._rate.is_updating or factor is None:
            return rate
        # `iterations` counts updates; warm-up counts batches, as Keras's schedules do.
        batches = self.iterations * (self.gradient_accumulation_steps or 1)  # type: ignore[attr-defined]
        if ahead:
            batches = keras.ops.cast(batches, "float32") + ahead
        scale = factor(batches)
        return rate * keras.ops.cast(scale, keras.ops.convert_to_tensor(rate).dtype)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        super(ScalesRate, type(self)).learning_rate.fset(self, value)  # type: ignore[attr-defined,misc]
