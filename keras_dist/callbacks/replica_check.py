"""Check that all ranks hold the same model."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import comm, mixin
from keras_dist.callbacks.fit_hooks import FitCallback, FitHooks, Logs
from keras_dist.errors import check_choice, check_count
from keras_dist.launch.hosts import ranks_in_words
from keras_dist.lines import warn
from keras_dist.optimizer.accumulation import own_sums
from keras_dist.optimizer.nested import optimizers_of, state_of
from keras_dist.training.losses import is_keras_method
from keras_dist.training.same_values import read_checksums

Action = Literal["raise", "resync"]

# A message names at most so many variables.
_SHOWN = 5


class ReplicaCheck(FitCallback):
    """Switches on a check that all ranks hold the same model, bit by bit.

    Every rank applies every update to its own copy of the model, from the same averaged
    gradients. If a callback changes a weight on one rank, or a machine computes a wrong
    result, the ranks train different models from then on, without an error. This
    callback detects the difference: every `every` steps and at the end of each epoch,
    each rank computes a checksum of its variables, and one collective compares the
    checksums. On a CPU, each variable is read once; on a GPU, it is first copied to the
    host.

    Variables that may differ between the ranks are not compared: random generators,
    metrics, accumulated gradients, and non-trainable weights, which `AverageStatistics`
    synchronizes.

    `dist_fit` adds `ReplicaCheck(every=None)` if the list has none. On one rank, the
    callback does nothing.

    Position in the list: a callback of keras_dist before those that save.

    Args:
        every: Steps between two checks, the same on all ranks. `None`: check only at
            the end of each epoch.
        action: What happens on all ranks when a difference is found. `"raise"`: an
            error. `"resync"`: a warning on the first rank; then the variables that
            differ are broadcast from the lowest rank of the largest group of equal
            ranks.

    Raises:
        ValueError: If `every` or `action` is invalid, or differs between the ranks.
        RuntimeError: On all ranks, if their variables differ and `action` is `"raise"`.
            The message names the first variable that differs, and the ranks.

    Example:

    >>> ReplicaCheck(every=10, action="resync").every
    10
    """

    def __init__(self, every: int | None = 100, action: Action = "raise") -> None:
        super().__init__()
        check_choice("action", action, get_args(Action))
        self.every = None if every is None else check_count("every", every)
        self.action = action
        self._steps = 0
        self._epoch = 0
        self._last_batch = -1
        self._by_rank: Sequence[Any] | None = None

    def switch_on(self, hooks: FitHooks) -> None:
        hooks.checks.append(self)

    def begin(self) -> None:
        """Begin a training."""
        self._steps = 0

    def describe(self) -> str:
        """Describe what has to be equal on all ranks."""
        return f"every={self.every}, action={self.action!r}"

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self._epoch, self._last_batch = epoch, -1

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        before = self._steps
        # With `steps_per_execution` this is not called after each step.
        # After a resume, batches are counted from 0 again in the middle of an epoch.
        self._steps += batch - (self._last_batch if batch > self._last_batch else -1)
        self._last_batch = batch
        if self.every and self._steps // self.every > before // self.every:
            self.check()

    def read(self) -> Any:
        """Return the checksums of this rank."""
        return read_checksums(_variables(self.model)) if comm.size() > 1 else ()

    def end_epoch(self, by_rank: Sequence[Any], logs: Logs) -> None:
        """Check what `read` has returned on each rank."""
        with mixin.change(self, _by_rank=by_rank):
            self.check()

    def check(self) -> None:
        """Compare now; must be called on every rank.

        Raises:
            RuntimeError: On all ranks, if they differ and `action` is `"raise"`.
        """
        if comm.size() == 1:
            return
        variables = _variables(self.model)
        by_rank = self._by_rank or comm.gather(self.read())
        # The lowest rank of the largest group of equal ranks.
        root = by_rank.index(Counter(by_rank).most_common(1)[0][0])
        is_other = np.array(by_rank).T != np.array([by_rank[root]]).T
        if not is_other.any():
            return
        differing = np.flatnonzero(is_other.any(axis=1)).tolist()
        # With the names of the first rank: Keras counts layers in each process.
        paths = comm.broadcast([variables[index].path for index in differing])
        message = self._message(paths, is_other[differing[0]], root)
        threads = comm.gather(comm.device().threads)
        if len(set(threads)) > 1:  # as on hosts of different sizes
            message += (
                " Norms of large gradients (`clipnorm`, `Lamb`) depend on the number "
                f"of threads, which is {threads} on the ranks: set one "
                "TF_NUM_INTRAOP_THREADS for all of them."
            )
        if self.action == "raise":
            raise RuntimeError(message)
        if comm.rank() == 0:
            warn(message)
        comm.broadcast_variables([variables[n] for n in differing], root)

    def _message(self, paths: list[str], is_other: Any, root: int) -> str:
        others = [f"`{path}`" for path in paths[1:_SHOWN]]
        if more := len(paths) - 1 - len(others):
            others.append(f"and {more} more")
        also = f"; so do {', '.join(others)}" if others else ""
        if self.action == "resync":
            advice = f"They are copied from rank {root} to all."
        else:
            advice = (
                f"{_name_causes(self.model)} "
                'ReplicaCheck(action="resync") copies the variables that differ.'
            )
        ranks, agreeing = np.flatnonzero(is_other), np.flatnonzero(~is_other)
        return (
            "The ranks no longer hold the same model. Received: after step "
            f"{self._last_batch + 1} of epoch {self._epoch + 1}, `{paths[0]}` on "
            f"{ranks_in_words(ranks)} differs from {ranks_in_words(agreeing)}"
            f"{also}. {advice}"
        )


def _variables(model: Any) -> list[Any]:
    """Variables that must be equal on all ranks, in the same order on all of them.

    The learning rate comes first, then weights, then slots: the first variable that
    differs is nearest to the cause.
    """
    optimizers = optimizers_of(model)
    state = [variable for each in optimizers for variable in state_of(each)]
    left_out = {id(variable) for each in optimizers for variable in own_sums(each)}
    numbers = [variable for variable in state if len(variable.shape) == 0]
    variables = [*numbers, *model.trainable_weights, *state]
    return list({id(v): v for v in variables if id(v) not in left_out}.values())


def _name_causes(model: Any) -> str:
    if is_keras_method(model, "train_step"):
        return "Make callbacks change weights and rates alike on every rank."
    own_step = model.__class__.train_step
    return (
        f"Make callbacks and `{own_step.__qualname__}` change weights and rates alike "
        "on every rank. A step that adds to a weight and subtracts it again leaves "
        "rounding errors: assign a copy of the weight instead."
    )
