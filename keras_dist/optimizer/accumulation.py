"""Several batches to an update: the ranks talk once per update."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist import comm
from keras_dist.optimizer.nested import leaves


def accumulates(optimizer: Any) -> bool:
    """Whether gradients of several batches are added up on each rank by itself.

    Not inside a `LossScaleOptimizer`, which decides about each batch by the gradients
    of all ranks, and not in a `MultiOptimizer`, whose parts may each have their own
    number of batches, nor where a guard watches: there the ranks talk after every
    batch.
    """
    state = getattr(optimizer, "_averaging", None)
    is_single = leaves(optimizer) == [optimizer] and not getattr(
        state, "is_watched", False
    )
    return is_single and bool(optimizer.gradient_accumulation_steps)


def accumulators_of(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Where Keras adds up the gradients of some variables."""
    return [
        optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]
        for variable in variables
    ]


def own_sums(optimizer: Any) -> list[Any]:
    """Accumulators that hold what this rank alone has added up."""
    if not (optimizer.built and accumulates(optimizer)):
        return []
    return list(optimizer._accumulated_gradients)


def is_update(optimizer: Any) -> Any:
    """Whether the present batch ends in an update; the same on all ranks."""
    batches = optimizer.gradient_accumulation_steps
    return (tf.convert_to_tensor(optimizer._iterations.value) + 1) % batches == 0


def take(accumulator: Any, gradient: Any) -> Any:
    """What has been added up, with the last gradient; nothing is left behind."""
    everything = accumulator.value + tf.cast(gradient, accumulator.dtype)
    accumulator.assign(tf.zeros_like(accumulator.value))
    return everything


def is_between_updates(optimizer: Any) -> bool:
    """Whether some batches have been added up and not yet used."""
    if not (optimizer.built and accumulates(optimizer)):
        return False
    return int(optimizer._iterations.value) % optimizer.gradient_accumulation_steps != 0


def sum_accumulated(optimizer: Any) -> None:
    """Give every rank the sum of what all have added up, as one process holds it."""
    accumulators = _shared(optimizer)
    for dtype in (tf.float32, tf.float64):
        own = [
            a for a in accumulators if (a.dtype == "float64") == (dtype == tf.float64)
        ]
        sums = comm.sum_tensors(
            [a.value for a in own],
            name=f"keras_dist.accumulated.{dtype.name}",
            dtype=dtype,
        )
        for accumulator, summed in zip(own, sums, strict=True):
            accumulator.assign(tf.cast(summed, accumulator.dtype))


def divide(optimizer: Any) -> None:
    """Leave each rank its part of what is equal on all: undoes `sum_accumulated`."""
    for accumulator in _shared(optimizer):
        accumulator.assign(accumulator.value / comm.size())


def _shared(optimizer: Any) -> list[Any]:
    local = optimizer._averaging.options.local_ids()
    variables = [v for v in optimizer._trainable_variables if id(v) not in local]
    return accumulators_of(optimizer, variables)
