"""Check that all ranks hold the same model."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, optimizer, private
from keras_dist.lines import warn

# Elements that are processed at a time on a GPU, so that intermediate results stay
# small beside a model that fills the memory.
_PIECE = 2**24

_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def fingerprints(variables: Sequence[Any]) -> np.ndarray:
    """One int64 checksum a variable: equal if all bits are equal, also those of NaN.

    Only the checksums are copied to the host.
    """
    tensors = (tf.convert_to_tensor(variable.value) for variable in variables)
    prints = [
        checksum(tensor) if "CPU" in tensor.device else sum_of_bits(tensor)
        for tensor in tensors
    ]
    return np.array([int(number) for number in prints], np.int64)


def checksum(tensor: Any) -> int:
    """CRC-32 of a tensor in host memory, which is read without a copy."""
    return zlib.crc32(np.asarray(tensor).reshape(-1).view(np.uint8).data)


def sum_of_bits(tensor: Any) -> Any:
    """Checksum of a tensor on another device: the sum of its words × odd numbers.

    Sums wrap around at 64 bits. The sum changes if one bit of one word changes, or if
    two different words are swapped. The result is a tensor, and the host does not wait
    for it here.
    """
    words = tf.reshape(
        tf.cast(tensor, tf.int8) if tensor.dtype.is_bool else tensor, [-1]
    )
    total = tf.zeros([], tf.int64)
    for begin in range(0, int(words.shape[0]), _PIECE):
        piece = words[begin : begin + _PIECE]
        bits = tf.bitcast(piece, _INTEGERS[piece.dtype.size])
        total = 31 * total + _weighted_sum(tf.cast(bits, tf.int64))
    return total


@tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
def _weighted_sum(words: Any) -> Any:
    odd = 2 * tf.range(tf.size(words, tf.int64), dtype=tf.int64) + 1
    return tf.reduce_sum(words * odd)


Action = Literal["raise", "warn", "resync"]

# A message names at most so many variables.
_SHOWN = 5


class ReplicaCheck(keras.callbacks.Callback):
    """Compares the weights and the optimizer's state of all ranks, bit by bit.

    Every rank applies every update to its own copy of the model, from the same averaged
    gradients. If a callback changes a weight on one rank, or a machine computes a wrong
    result, the ranks train different models from then on, without an error. This
    callback finds it: every `every` steps and at the end of each epoch, each rank
    computes a checksum of its variables, and one collective compares the checksums. On
    a CPU each variable is read once, which took 0.3 and 0.5 % of the time of 100 steps
    of two models (`benchmarks/checks.py`).

    Variables that may differ between the ranks are not compared: random generators,
    metrics, accumulated gradients, and non-trainable weights, which `AverageStatistics`
    synchronizes.

    `dist_fit` adds one with `every=None` if the list has none. On one rank it does
    nothing.

    Position in the list: after `AverageStatistics`, before callbacks that save.

    Args:
        every: Steps from one check to the next, the same on all ranks; `None`: only at
            the ends of epochs.
        action: What happens on all ranks when a difference is found. `"raise"`: an
            error; `"warn"`: a warning on the first rank, once for each new difference;
            `"resync"`: the warning, and the variables that differ are broadcast from
            the root: the lowest rank of the largest group of equal ranks.

    Raises:
        ValueError: If `every` or `action` is not valid, or not the same on all ranks.
        RuntimeError: On all ranks, if they differ and `action` is `"raise"`. The
            message names the first variable that differs, and the ranks.

    Example:

    >>> ReplicaCheck(every=10, action="warn").every
    10
    """

    def __init__(self, every: int | None = 100, action: Action = "raise") -> None:
        super().__init__()
        is_number = isinstance(every, int) and not isinstance(every, bool)
        if every is not None and not (is_number and every > 0):
            raise ValueError(
                "`every` must be a number of steps of at least 1, or None to check "
                f"at the ends of epochs only. Received: every={every!r}"
            )
        if action not in get_args(Action):
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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._steps, self._is_reported = 0, None
        comm.agree(
            {"ReplicaCheck": f"every={self.every}, action={self.action!r}"},
            advice="Pass the same ReplicaCheck on every rank.",
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._last_batch = epoch, -1

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        before = self._steps
        # With `steps_per_execution` this is not called after each step.
        self._steps += batch - self._last_batch
        self._last_batch = batch
        if self.every and self._steps // self.every > before // self.every:
            self.check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.check()

    def check(self) -> None:
        """Compare now; must be called on every rank.

        Raises:
            RuntimeError: On all ranks, if they differ and `action` is `"raise"`.
        """
        if comm.size() == 1:
            return
        variables = _variables(self.model)
        own = fingerprints(variables)
        digests = comm.stack(_digest(own), purpose="replicas").numpy()
        if (digests == digests[0]).all():
            self._is_reported = None
            return
        # Checksums by variable and rank.
        table = np.array(comm.gather(own)).T
        ranks = list(map(tuple, table.T.tolist()))
        # The lowest rank of the largest group of equal ranks.
        root = ranks.index(Counter(ranks).most_common(1)[0][0])
        is_other = table != table[:, [root]]
        differing = np.flatnonzero(is_other.any(axis=1)).tolist()
        # With the names of the first rank: Keras counts layers in each process.
        paths = comm.broadcast([variables[index].path for index in differing])
        message = self._message(paths, is_other[differing[0]], root)
        if self.action == "raise":
            with comm.together():
                raise RuntimeError(message)
        found = differing[0], is_other[differing[0]].tolist()
        if comm.rank() == 0 and found != self._is_reported:
            warn(message)
        self._is_reported = found
        if self.action == "resync":
            self._is_reported = None
            comm.broadcast_variables([variables[n] for n in differing], root)

    def _message(self, paths: list[str], is_other: Any, root: int) -> str:
        others = [f"`{path}`" for path in paths[1:_SHOWN]]
        if more := len(paths) - 1 - len(others):
            others.append(f"and {more} more")
        also = f"; nor are {', '.join(others)}" if others else ""
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
            f"{_name_ranks(ranks)} is not what it is on {_name_ranks(agreeing)}"
            f"{also}. {advice}"
        )


def _variables(model: Any) -> list[Any]:
    """Variables that must be equal on all ranks, in the same order on all of them.

    The learning rate comes first, then weights, then slots: the first variable that
    differs is nearest to the cause.
    """
    left_out: set[int] = set()
    state = []
    for found in optimizer.optimizers_of(model):
        state += found.variables
        left_out |= {id(variable) for variable in optimizer.own_sums(found)}
    numbers = [variable for variable in state if len(variable.shape) == 0]
    variables = [*numbers, *model.trainable_weights, *state]
    return list({id(v): v for v in variables if id(v) not in left_out}.values())


def _digest(own: np.ndarray) -> Any:
    digest = hashlib.blake2b(
        own.reshape(-1).view(np.uint8).data, digest_size=8
    ).digest()
    return tf.constant(np.frombuffer(digest, np.int64))


def _name_ranks(ranks: Any) -> str:
    """Return ranks as words.

    >>> _name_ranks([1]), _name_ranks([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _name_causes(model: Any) -> str:
    own_step = model.__class__.train_step
    if own_step.__module__.startswith(private.MODULES):
        return "Make callbacks change weights and rates alike on every rank."
    return (
        f"Make callbacks and `{own_step.__qualname__}` change weights and rates alike "
        "on every rank. A step that adds to a weight and subtracts it again leaves "
        "roundings: assign a copy of the weight instead."
    )
