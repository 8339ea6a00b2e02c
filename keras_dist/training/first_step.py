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

    def start(
        self, model: Any, data: Any, own_step: Callable[[Any], Any], *, is_plain: bool
    ) -> None:
        """Build `model` and call the hooks; called when its first step begins.

        Args:
            model: In the middle of its first train step, perhaps in a graph.
            data: The batch.
            own_step: The model's own train step.
            is_plain: Whether the model's own train step is used unchanged.
        """
        self._has_started = True
        step = build.OwnStep(own_step, data, is_eager=tf.executing_eagerly())
        with step_context.entered(step_context.StepContext()):
            is_built_here = self._builds_on_one_rank or not is_plain
            if is_built_here or build.holds_unbuilt_optimizers(model):
                _on_all(lambda: build.build(model, step))
            # Outside of the graph that is being traced, so that this runs once, now.
            with tf.init_scope():
                batch_norm.synchronize(model)
                for hook in self._hooks:
                    hook()


def _on_all(work: Callable[[], None]) -> None:
    """Run `work` in the graph that is being traced; raise an error of it on all."""
    failed: list[Exception] = []
    try:
        work()
    except Exception as error:
        failed.append(error)

    def report() -> None:
        if failed:
            raise failed[0]

    with tf.init_scope():
        comm.run_on_all(report)
