"""Build the model and call hooks, once, before the first train step runs."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist import comm
from keras_dist.optimizer import step_context
from keras_dist.training import batch_norm, build


class FirstStep:
    """Builds the model from its first batch, then calls hooks.

    The hooks copy weights to all ranks and scale learning rates: all variables exist by
    then, and none has changed.
    """

    def __init__(self) -> None:
        self._hooks: list[Callable[[], None]] = []
        self._has_started = False
        self._builds_on_one_rank = False

    @property
    def has_started(self) -> bool:
        """Whether a train step has begun in this fit."""
        return self._has_started

    def call_last(self, hook: Callable[[], None]) -> None:
        """Add `hook` at the end of the list, unless it is there already."""
        if hook not in self._hooks:
            self._hooks.append(hook)

    def call_first(self, hook: Callable[[], None], *, after: int = 0) -> None:
        """Insert `hook` after the first `after` hooks, unless it is there already."""

        if hook not in self._hooks:
            self._hooks.insert(after, hook)

    def build_on_one_rank(self) -> None:
        """Build everything before the first step on one rank too, unlike Keras."""
        self._builds_on_one_rank = True

    def start(self, model: Any, data: Any, *, is_plain: bool) -> None:
        """Build `model` and call the hooks; called when its first step begins.

        Args:
            model: In the middle of its first train step, perhaps in a graph.
            data: The batch.
            is_plain: Whether the model's own train step is used unchanged.
        """
        self._has_started = True
        # Outside of the graph that is being traced, so that this runs once, now.
        inside = step_context.entered(step_context.StepContext())
        with tf.init_scope(), inside:
            is_built_here = self._builds_on_one_rank or not is_plain
            if is_built_here or build.holds_unbuilt_optimizers(model):
                comm.run_on_all(lambda: build.build(model, data))
            batch_norm.synchronize(model)
            for hook in self._hooks:
                hook()
