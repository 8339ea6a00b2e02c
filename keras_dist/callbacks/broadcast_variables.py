"""Start all ranks from the same state."""

from typing import Any

import keras
import numpy as np

from keras_dist import comm, optimizer
from keras_dist.training import step
from keras_dist.training.session import session_of

_GOLDEN = 0x9E3779B9  # 2³² over the golden ratio: seeds of neighbors lie far apart


class BroadcastVariables(keras.callbacks.Callback):
    """Copies weights and optimizer state from one rank to all before the first step.

    The model and its optimizer are built first, so that the optimizer's state is
    copied too and no step is made from different weights. States of random generators
    are not copied but derived from those of the root: each rank draws its own dropout
    masks, and one seed makes them reproducible.

    Stands last in a list: what another callback restores on the root is copied.

    Args:
        root_rank: The rank whose state is copied.

    Raises:
        ValueError: On all ranks, before anything is copied, if the ranks' variables
            differ in number, shape or dtype; or if the model's optimizer does not
            average (see `keras_dist.DistributedOptimizer`).

    Example:

    ```python
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    model.fit(x, y, callbacks=[keras_dist.BroadcastVariables()])
    ```
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if getattr(model, "optimizer", None) is not None:
            optimizer.hoist(model.optimizer)
        # First: what the other hooks see is what all ranks start from.
        step.install(model).first_step.call_first(self.broadcast)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # A fit that was restored on the root goes on at the same epoch on all ranks.
        epoch = comm.broadcast(
            getattr(self.model, "_initial_epoch", None), self.root_rank
        )
        if epoch is not None:
            self.model._initial_epoch = epoch

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if comm.size() > 1 and not session_of(self.model).first_step.has_started:
            self._copy_unstarted()
        step.uninstall(self.model)

    def broadcast(self) -> None:
        """Copy now: called when the model is built and no step has been made."""
        if comm.size() == 1:
            return
        _check_averages(self.model)
        variables, seeds = _state(self.model)
        comm.agree(
            _facts(variables, seeds),
            advice="Make the same model with the same optimizer on every rank.",
        )
        comm.broadcast_variables(variables, self.root_rank)
        states = [keras.ops.convert_to_numpy(seed) for seed in seeds]
        received = comm.broadcast_arrays(states, self.root_rank)
        for variable, value in zip(seeds, received, strict=True):
            variable.assign(_own_seed(value, comm.rank() - self.root_rank))

    def _copy_unstarted(self) -> None:
        """Copy what was restored on the root, where no epoch was left to train."""
        if any(comm.gather(self.model.built)):
            comm.run_on_all(lambda: _build_optimizers(self.model))
            self.broadcast()


def _build_optimizers(model: Any) -> None:
    for found in optimizer.optimizers_of(model):
        if model.built and not found.built:
            found.build(model.trainable_variables)


def _state(model: Any) -> tuple[list[Any], list[Any]]:
    """Variables to copy, and states of random generators to derive."""
    seeds = [v for v in model.variables if v.name == "seed_generator_state"]
    variables = list(model.weights)
    for found in optimizer.optimizers_of(model):
        variables += found.variables
    local = optimizer.local_ids(model)
    return list({id(v): v for v in variables if id(v) not in local}.values()), seeds


def _facts(variables: list[Any], seeds: list[Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "the number of variables": len(variables),
        "the number of random generators": len(seeds),
    }
    for index, variable in enumerate(variables):
        kind = f"{tuple(variable.shape)} {variable.dtype}"
        facts[f"the shape of variable {index}"] = kind
    return facts


def _own_seed(state: np.ndarray, distance: int) -> np.ndarray:
    own = state.copy()
    seed = int(state.flat[0]) + distance * _GOLDEN
    own.flat[0] = np.asarray(seed % 2**32).astype(state.dtype)
    return own


def _check_averages(model: Any) -> None:
    compiled = getattr(model, "optimizer", None)
    if compiled is not None and not optimizer.is_distributed(compiled):
        raise ValueError(
            f"The optimizer of this model does not average its gradients, so the "
            f"{comm.size()} ranks would drift apart. Received: {compiled!r}. Compile "
            "with keras_dist.DistributedOptimizer(optimizer), or call "
            "keras_dist.dist_fit(model, …) instead of model.fit(…)."
        )
