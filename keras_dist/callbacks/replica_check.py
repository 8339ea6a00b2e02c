"""Whether all ranks still hold the same model."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, optimizer
from keras_dist.callbacks.fingerprints import fingerprints

ACTIONS = ("raise", "warn", "resync")

# So many variables that differ are named.
_SHOWN = 5


class ReplicaCheck(keras.callbacks.Callback):
    """Compares the weights and the optimizer's state of all ranks, bit by bit.

    Every rank computes every update by itself, from the same gradients. A callback that
    changes a weight on one rank, or a machine that computes wrongly, leaves the ranks
    with different models from then on, and no error says so. This one does: after every
    `every` steps and at the end of each epoch each rank makes one number of all that it
    holds, and one collective compares them: on a CPU by reading it once, which took
    0.3 and 0.5 % of the time of 100 steps of two models (`benchmarks/checks.py`).

    What ranks may hold differently is left out: layers in `local_layers`, random
    generators, metrics, gradients that are added up for an update to come, and weights
    that no gradient changes, which `AverageStatistics` brings together.

    With `sync="every:k"`, where ranks differ by right for some steps, it looks at the
    ends of epochs only.

    `dist_fit` adds one with `every=None` where the list has none. Stands behind
    `AverageStatistics` and before callbacks that save. On one rank it does nothing.

    Args:
        every: Steps from one check to the next, the same on all ranks; `None`: at the
            ends of epochs only.
        action: What happens on all ranks when a difference is found. `"raise"`: an
            error; `"warn"`: a warning on the first rank, once for each new difference;
            `"resync"`: the warning, and what differs is copied from the first of the
            ranks that agree with most others.

    Raises:
        ValueError: If `every` or `action` is unusable, or they are not the same on all
            ranks.
        RuntimeError: On all ranks, if they differ and `action` is `"raise"`: with the
            first variable that differs, and the ranks.

    >>> ReplicaCheck(every=10, action="warn").every
    10
    """

    def __init__(self, every: int | None = 100, action: str = "raise") -> None:
        super().__init__()
        is_number = isinstance(every, int) and not isinstance(every, bool)
        if every is not None and not (is_number and every > 0):
            raise ValueError(
                "`every` must be a number of steps of at least 1, or None for the ends "
                f"of epochs only. Received: every={every!r}"
            )
        if action not in ACTIONS:
            raise ValueError(
                '`action` must be "raise", "warn" or "resync". '
                f"Received: action={action!r}"
            )
        self.every = every
        self.action = action
        self._steps = 0
        self._epoch = 0
        self._last_batch = -1
        self._is_reported: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._steps, self._is_reported = 0, None
        comm.agree(
            {"ReplicaCheck": f"every={self.every}, action={self.action!r}"},
            advice="Give the same ReplicaCheck to every rank.",
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._last_batch = epoch, -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before = self._steps
        # With `steps_per_execution` this is not called after each step.
        self._steps += batch - self._last_batch
        self._last_batch = batch
        is_due = self.every and self._steps // self.every > before // self.every
        if is_due and not _use_local_sgd(self.model):
            self.check()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.check()

    def check(self) -> None:
        """Compare now; every rank calls this.

        Raises:
            RuntimeError: As the class says.
        """
        if comm.size() == 1:
            return
        variables = _variables(self.model)
        own = fingerprints(variables)
        everyone = comm.stack(_digest(own), verb="replicas").numpy()
        if (everyone == everyone[0]).all():
            self._is_reported = None
            return
        paths = [variable.path for variable in variables]
        difference = _difference(comm.gather((paths, own.tolist())))
        message = self._message(difference)
        if self.action == "raise":
            raise RuntimeError(message)
        found = difference.indices[:1], difference.ranks
        if comm.rank() == 0 and found != self._is_reported:
            warnings.warn(message, stacklevel=2)
        self._is_reported = found
        if self.action == "resync":
            self._is_reported = None
            comm.broadcast_variables(
                [variables[index] for index in difference.indices], difference.root
            )

    def _message(self, found: "_Difference") -> str:
        others = [f"`{path}`" for path in found.paths[1:_SHOWN]]
        if more := len(found.paths) - 1 - len(others):
            others.append(f"and {more} more")
        also = f"; nor are {', '.join(others)}" if others else ""
        if self.action == "resync":
            advice = f"They are copied from rank {found.root} to all."
        else:
            advice = (
                "Let callbacks change weights and rates alike on every rank, and name "
                "layers of a rank's own in `local_layers`. "
                'ReplicaCheck(action="resync") copies what differs.'
            )
        return (
            "The ranks no longer hold the same model. Received: after step "
            f"{self._last_batch + 1} of epoch {self._epoch + 1}, `{found.paths[0]}` on "
            f"{_named(found.ranks)} is not what it is on {_named(found.agreeing)}"
            f"{also}. {advice}"
        )


@dataclass(frozen=True)
class _Difference:
    """What differs over the ranks.

    Args:
        indices: Of the variables that differ.
        paths: Of the same, as the root calls them.
        root: The first of the ranks that agree with most others.
        ranks: Those that hold another value of the first variable than the root.
        agreeing: Those that hold the same.
    """

    indices: tuple[int, ...]
    paths: tuple[str, ...]
    root: int
    ranks: tuple[int, ...]
    agreeing: tuple[int, ...]


def _difference(everyone: Sequence[tuple[list[str], list[int]]]) -> _Difference:
    """Of paths and fingerprints of each rank, which are not all equal."""
    prints = [tuple(own) for _, own in everyone]
    largest = max(Counter(prints).values())
    # Where as many agree with each other as with others, the lowest rank is right.
    root = next(r for r, own in enumerate(prints) if prints.count(own) == largest)
    table = list(zip(*prints, strict=True))
    indices = tuple(n for n, row in enumerate(table) if len(set(row)) > 1)
    first = table[indices[0]]
    return _Difference(
        indices=indices,
        paths=tuple(everyone[root][0][index] for index in indices),
        root=root,
        ranks=tuple(r for r, value in enumerate(first) if value != first[root]),
        agreeing=tuple(r for r, value in enumerate(first) if value == first[root]),
    )


def _variables(model: Any) -> list[Any]:
    """What all ranks have to hold alike, in the same order on all of them.

    Causes come before what follows from them: a rate, weights, and then slots.
    """
    left_out = optimizer.local_ids(model)
    state = []
    for found in optimizer.optimizers_of(model):
        state += found.variables
        left_out |= {id(variable) for variable in optimizer.own_sums(found)}
    numbers = [variable for variable in state if len(variable.shape) == 0]
    variables = [*numbers, *model.trainable_weights, *state]
    return list({id(v): v for v in variables if id(v) not in left_out}.values())


def _use_local_sgd(model: Any) -> bool:
    found = optimizer.optimizers_of(model)
    return comm.size() > 1 and any(map(optimizer.uses_local_sgd, found))


def _digest(own: np.ndarray) -> Any:
    digest = hashlib.blake2b(
        own.reshape(-1).view(np.uint8).data, digest_size=8
    ).digest()
    return tf.constant(np.frombuffer(digest, np.int64))


def _named(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> _named([1]), _named([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
