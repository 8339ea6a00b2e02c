"""Start all ranks from the same state."""

from typing import Any

import keras

from keras_dist import comm
from keras_dist.callbacks.fit_hooks import FitCallback, FitHooks
from keras_dist.optimizer.accumulation import own_sums
from keras_dist.optimizer.attach import is_distributed, move_to_outermost
from keras_dist.optimizer.nested import build_optimizer, optimizers_of, state_of
from keras_dist.training.same_values import agree_on_constants
from keras_dist.training.session import session_of


class BroadcastVariables(FitCallback):
    """Switches on the broadcast of the first rank's state before the first step.

    All ranks get its weights and the state of its optimizer. Model and optimizer are
    built first: otherwise the optimizer would have no state to copy, and the first step
    would start from different weights. States of random generators are copied, too:
    each rank draws its rows of what one process draws.

    Position in the list: a callback of keras_dist after those that restore state on the
    first rank, so that it is broadcast, too.

    Raises:
        ValueError: On all ranks, before anything is broadcast, if the ranks' variables
            differ in number, shape or dtype; or if the model's optimizer does not
            average gradients (see `keras_dist.DistributedOptimizer`).
        RuntimeError: On all ranks, after the first batch, if the model was trained
            without the `train_step` of its class.

    Example:

    ```python
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    model.fit(x, y, callbacks=[keras_dist.BroadcastVariables()])
    ```
    """

    def switch_on(self, hooks: FitHooks) -> None:
        hooks.use(broadcast=self)
        if getattr(hooks.model, "optimizer", None) is not None:
            move_to_outermost(hooks.model.optimizer)

    def end(self) -> None:
        """Copy what the first rank restored, if no epoch was left to train."""
        has_started = comm.size() == 1 or session_of(self.model).has_started
        if not has_started and any(comm.gather(self.model.built)):
            with comm.raise_on_all():
                build_optimizers(self.model)
            self._copy()

    def copy_to_all(self) -> None:
        """Broadcast now: called when the model is built, before the first step."""
        self._copy()
        if comm.rank() != 0:
            # Theirs are added to the first rank's, which count once.
            for outer in optimizers_of(self.model):
                for accumulator in own_sums(outer):
                    accumulator.assign(keras.ops.zeros_like(accumulator))

    def _copy(self) -> None:
        if comm.size() == 1:
            return
        _check_averages(self.model)
        variables = state_variables(self.model)
        comm.agree_on_variables(variables, {})
        agree_on_constants(self.model)
        comm.broadcast_variables(variables, 0)


def build_optimizers(model: Any) -> None:
    """Make the state of the optimizers of a built model."""
    for outer in optimizers_of(model):
        if model.built:
            build_optimizer(outer, model.trainable_variables)


def state_variables(model: Any) -> list[Any]:
    """List the variables that all ranks have alike, in the same order on every rank.

    Weights, the state of optimizers, and that of generators of random numbers: each
    rank draws its rows of one draw (`training.noise`).
    """
    variables = list(model.weights)
    for outer in optimizers_of(model):
        variables += state_of(outer)
    variables += [v for v in model.variables if v.name == "seed_generator_state"]
    return list({id(v): v for v in variables}.values())


def _check_averages(model: Any) -> None:
    compiled = getattr(model, "optimizer", None)
    if compiled is not None and not is_distributed(compiled):
        raise ValueError(
            "The optimizer of this model does not average its gradients, so the models "
            f"of the {comm.size()} ranks would diverge. Received: {compiled!r}. "
            "Compile with keras_dist.DistributedOptimizer(optimizer), or call "
            "keras_dist.dist_fit(model, …) instead of model.fit(…)."
        )
