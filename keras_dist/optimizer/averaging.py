"""Average gradients over the ranks before each update."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin
from keras_dist.optimizer.parts import parts

# Rows that the gradients now being computed are a mean over; `None`: not known, all
# ranks count alike. Set around a train step, read when the step is traced.
_rows: ContextVar[Any] = ContextVar("rows", default=None)

# Where `apply` leaves its gradients while a step is only recorded.
_record: ContextVar["list[Recorded] | None"] = ContextVar("record", default=None)

# Whether the gradients that `apply` gets are averaged already.
_is_averaged: ContextVar[bool] = ContextVar("is_averaged", default=False)

# Optimizers are numbered in the order in which they are wrapped, the same on every
# rank: Horovod matches collectives by name, and Keras's names repeat.
_numbers = count()


@dataclass
class Recorded:
    """One call of `apply` that was recorded instead of carried out."""

    optimizer: Any
    gradients: Sequence[Any]
    variables: Sequence[Any] | None


@dataclass
class _Averaging:
    """What an optimizer that averages remembers."""

    number: int
    is_checked: bool = False


def DistributedOptimizer(optimizer: Any) -> Any:  # noqa: N802 - Horovod's own name
    """Make `optimizer` average its gradients over all ranks before each update.

    For scripts that call `model.fit` themselves with the callbacks of this package,
    and for custom training loops. `dist_fit` does this by itself for the time of the
    fit. The gradients are averaged in `apply`, where every Keras train step and every
    custom loop ends: clipping, weight decay and the check for inf see the average.

    The object is changed in place and keeps its state; in a saved file it is the
    plain optimizer that it was.

    Args:
        optimizer: A `keras.optimizers.Optimizer`; with mixed precision the outermost
            one, or simply the one given to `compile`.

    Returns:
        The same object.

    Raises:
        TypeError: If `optimizer` is not a Keras optimizer.

    >>> optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3))
    >>> type(optimizer).__name__
    'Adam'
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`optimizer` must be a Keras optimizer, such as keras.optimizers.Adam(). "
            f"Received: {optimizer!r} of type {type(optimizer).__name__}"
        )
    comm.init()
    if not mixin.has(optimizer, AveragesGradients):
        object.__setattr__(optimizer, "_averaging", _Averaging(next(_numbers)))
        mixin.add(optimizer, AveragesGradients)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether `optimizer`, or one that it holds inside, averages its gradients."""
    return any(mixin.has(part, AveragesGradients) for part in parts(optimizer))


def hoist(optimizer: Any) -> None:
    """Move averaging from an optimizer inside to the outermost one.

    With mixed precision, Keras puts a `LossScaleOptimizer` outside of an optimizer
    that the user wrapped, and skips the inner `apply` on a rank with an inf: the
    others would wait for it for ever.
    """
    inside = [p for p in parts(optimizer)[1:] if mixin.has(p, AveragesGradients)]
    for part in inside:
        mixin.remove(part, AveragesGradients)
    if inside:
        DistributedOptimizer(optimizer)


@contextlib.contextmanager
def averaging(optimizer: Any) -> Iterator[None]:
    """Average the gradients of `optimizer` inside the block.

    Afterwards it is as before: plain, or averaging if the user had made it so.
    """
    hoist(optimizer)
    was_plain = not mixin.has(optimizer, AveragesGradients)
    DistributedOptimizer(optimizer)
    try:
        yield
    finally:
        if was_plain:
            mixin.remove(optimizer, AveragesGradients)


@contextlib.contextmanager
def weighted_by(rows: Any) -> Iterator[None]:
    """Inside the block, average by `rows`, the rows in this rank's batch."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def rows_now() -> Any:
    """Rows that the gradients now being computed are a mean over, or `None`."""
    return _rows.get()


@contextlib.contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Inside the block, averaging optimizers record their updates and make none."""
    calls: list[Recorded] = []
    token = _record.set(calls)
    try:
        yield calls
    finally:
        _record.reset(token)


def apply_recorded(call: Recorded, averaged: Sequence[Any]) -> None:
    """Carry out a recorded update, with its gradients averaged."""
    token = _is_averaged.set(True)
    try:
        call.optimizer.apply(averaged, call.variables)
    finally:
        _is_averaged.reset(token)


def average_gradients(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Mean of each gradient over all ranks, by one collective for each dtype.

    The mean is weighted by the rows of each rank where they are known: the sum of
    gradient × rows, over the sum of rows, which is the gradient of the global batch
    also when its last part is ragged.

    Args:
        optimizer: An optimizer that averages.
        gradients: Tensors, `tf.IndexedSlices` or `None`.
    """
    state: _Averaging = optimizer._averaging
    dense: list[Any] = [
        None if g is None else tf.convert_to_tensor(g) for g in gradients
    ]
    if not state.is_checked:
        _check_same_gradients(dense)
        state.is_checked = True
    rows = _rows.get()
    result: list[Any] = list(dense)
    # Horovod carries no bfloat16, and float16 is too narrow for a sum.
    for wire in (tf.float32, tf.float64):
        places = [
            place
            for place, gradient in enumerate(dense)
            if gradient is not None and _wire_of(gradient) == wire
        ]
        if not places:
            continue
        weight = tf.cast(1 if rows is None else rows, wire)
        weighted = [tf.cast(dense[place], wire) * weight for place in places]
        *sums, total = comm.sum_tensors(
            [*weighted, weight],
            name=f"keras_dist.gradients.{state.number}.{wire.name}",
            dtype=wire,
        )
        for place, summed in zip(places, sums, strict=True):
            result[place] = tf.cast(summed / total, dense[place].dtype)
    return result


def _wire_of(gradient: Any) -> Any:
    return tf.float64 if gradient.dtype == tf.float64 else tf.float32


def _check_same_gradients(gradients: Sequence[Any]) -> None:
    # Once, at the first update: ranks trace that one together, but one of them alone
    # may trace again later, when its last batch has a new shape.
    with tf.init_scope():
        comm.agree(
            {"the number of gradients": len(gradients)}
            | {
                f"gradient {place}": "none"
                if gradient is None
                else f"{gradient.dtype.name} of shape {tuple(gradient.shape)}"
                for place, gradient in enumerate(gradients)
            },
            advice="Make the same model on every rank, and let every variable take "
            "part in the loss on all ranks or on none.",
        )


class AveragesGradients:
    """Mixin for the outermost optimizer: average, then update."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        calls = _record.get()
        if calls is not None:
            calls.append(Recorded(self, grads, trainable_variables))
            return None
        if comm.size() > 1 and grads and not _is_averaged.get():
            grads = average_gradients(self, grads)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]
