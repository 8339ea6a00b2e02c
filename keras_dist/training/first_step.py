"""What happens once, when the first train step is about to run."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist import comm
from keras_dist.optimizer import step_context
from keras_dist.training import batch_norm, build


class FirstStep:
    """Builds the model when its first batch is there, and calls hooks then.

    Weights are copied, and rates scaled, when all variables exist and before any of
    them has changed.
    """

    def __init__(self) -> None:
        self._hooks: list[Callable[[], None]] = []
        self._has_started = False
        self._builds_on_one_rank = False

    @property
    def has_started(self) -> bool:
        """Whether a train step was begun in this fit."""
        return self._has_started

    def call_last(self, hook: Callable[[], None]) -> None:
        """Call `hook` after those that are there; a second time adds nothing."""
        if hook not in self._hooks:
            self._hooks.append(hook)

    def call_first(self, hook: Callable[[], None], *, after: int = 0) -> None:
        """Call `hook` before those that are there, but for the first `after` of them.

        A second time adds nothing.
        """
        if hook not in self._hooks:
            self._hooks.insert(after, hook)

    def build_on_one_rank(self) -> None:
        """Build everything before the first step also where Keras would do it in it."""
        self._builds_on_one_rank = True

    def start(self, model: Any, data: Any, *, is_plain: bool) -> None:
        """The first step of `model` is about to run on a batch.

        Args:
            model: In the middle of its first train step, perhaps in a graph.
            data: The batch.
            is_plain: Whether a step is the model's own and nothing else.
        """
        self._has_started = True
        # Outside of the graph that is being traced, so that it happens once, now.
        inside = step_context.entered(step_context.StepContext())
        with tf.init_scope(), inside:
            is_built_here = self._builds_on_one_rank or not is_plain
            if is_built_here or build.holds_unbuilt_optimizers(model):
                comm.run_on_all(lambda: build.build(model, data))
            batch_norm.synchronize(model)
            for hook in self._hooks:
                hook()
