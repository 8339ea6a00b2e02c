"""Gradient accumulation: one allreduce for each update, not for each batch."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist import comm, private
from keras_dist.optimizer.nested import changes_updates, leaves, optimizers_of


def accumulates(optimizer: Any) -> bool:
    """Return True if each rank adds up its own gradients of several batches.

    In some cases gradients are averaged after each batch instead: inside a
    `LossScaleOptimizer`, which decides for each batch by the gradients of all ranks; in
    a `MultiOptimizer`, whose optimizers may accumulate different numbers of batches;
    and where a class of the user's changes the gradients of each batch.
    """
    is_plain = leaves(optimizer) == [optimizer] and not changes_updates(optimizer)
    return is_plain and bool(optimizer.gradient_accumulation_steps)


def own_sums(optimizer: Any) -> list[Any]:
    """Accumulators that hold sums of this rank only."""
    if not (optimizer.built and accumulates(optimizer)):
        return []
    return private.accumulators(optimizer)


def pending_sums(model: Any) -> list[Any]:
    """Accumulators of all optimizers with gradients that no update has used yet."""
    pending = []
    for outermost in optimizers_of(model):
        if accumulators := own_sums(outermost):
            done = int(private.batches_of(outermost).value)
            if done % outermost.gradient_accumulation_steps:
                pending += accumulators
    return pending


def move_to_first_rank(accumulators: Sequence[Any]) -> None:
    """Give the first rank the sums over all ranks, as on one process, others zeros.

    So a sum over the ranks always counts each gradient once.
    """
    own = [accumulator.value for accumulator in accumulators]
    sums = comm.sum_tensors(own, name="keras_dist.accumulated", dtype=tf.float64)
    for accumulator, summed in zip(accumulators, sums, strict=True):
        kept = summed if comm.rank() == 0 else tf.zeros_like(summed)
        accumulator.assign(tf.cast(kept, accumulator.dtype))
