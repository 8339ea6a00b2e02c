"""Local SGD: each rank makes k steps of its own, then weights are averaged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist import comm, private
from keras_dist.optimizer import step_context
from keras_dist.optimizer.nested import leaves, optimizers_of
from keras_dist.optimizer.step_context import own_variable


@dataclass
class LocalProgress:
    """Steps since the weights were averaged, and the state of the outer momentum.

    Args:
        steps: The number of these steps; the same on all ranks.
        rows: Rows of this rank in these steps.
        anchors: The weights after the last averaging; empty without outer momentum.
        velocities: The outer momentum, one velocity for each anchor.
    """

    steps: Any
    rows: Any
    anchors: Sequence[Any]
    velocities: Sequence[Any]


def uses_local_sgd(optimizer: Any) -> bool:
    """Tell whether `optimizer` updates each rank's weights by its own gradients."""
    state = getattr(optimizer, "_averaging", None)
    return state is not None and state.options.every > 1


def before_update(optimizer: Any) -> None:
    """At the first update, make the variables of `LocalProgress`."""
    state = optimizer._averaging
    if state.progress is not None:
        return
    with tf.init_scope():
        weights = _weights(optimizer) if state.options.outer_momentum else []
        state.progress = LocalProgress(
            _variable(tf.zeros([], tf.int64)),
            _variable(tf.zeros([], tf.float64)),
            [_variable(weight.value) for weight in weights],
            [_variable(tf.zeros_like(weight.value)) for weight in weights],
        )


def after_update(optimizer: Any) -> None:
    """Count a step, and average the weights if it was the k-th; in a graph or not."""
    state = optimizer._averaging
    with comm.within(state.options.process_set):
        if comm.size() == 1:
            return
        progress, rows = state.progress, step_context.current().rows
        progress.rows.assign_add(tf.cast(1 if rows is None else rows, tf.float64))
        progress.steps.assign_add(1)
        tf.cond(
            progress.steps.read_value() >= state.options.every,
            lambda: _average(optimizer),
            lambda: tf.constant(0),
        )


def synchronize_replicas(model: Any) -> None:
    """Average weights and optimizer state, after any number of local steps."""
    for optimizer in optimizers_of(model):
        if not uses_local_sgd(optimizer) or optimizer._averaging.progress is None:
            continue
        state = optimizer._averaging
        with comm.within(state.options.process_set):
            if int(state.progress.steps.numpy()):
                _average(optimizer)
            _synchronize_states(optimizer)


def _average(optimizer: Any) -> Any:
    """Average the weights over the ranks by rows, and apply the outer momentum."""
    state, progress = optimizer._averaging, optimizer._averaging.progress
    name = f"keras_dist.weights.{state.number}"
    stop_request = step_context.current().stop_request
    request = [] if stop_request is None else [stop_request.as_tensor(tf.float64)]
    total, *agreed = comm.sum_tensors(
        [progress.rows.read_value(), *request], name=f"{name}.rows", dtype=tf.float64
    )
    if stop_request is not None:
        stop_request.collect(agreed[0])
    weights = _weights(optimizer)
    fraction = progress.rows.read_value() / total
    means = _weighted_sums([weight.value for weight in weights], fraction, name)
    momentum = state.options.outer_momentum
    for index, (weight, mean) in enumerate(zip(weights, means, strict=True)):
        new = mean
        if momentum:
            anchor, velocity = progress.anchors[index], progress.velocities[index]
            step = momentum * velocity.read_value() + (mean - anchor.read_value())
            new = anchor.read_value() + step
            velocity.assign(step)
            anchor.assign(new)
        weight.assign(new)
    progress.steps.assign(0)
    progress.rows.assign(0.0)
    return tf.constant(0)


def _synchronize_states(optimizer: Any) -> None:
    """Average the optimizer's slots; scalars become the first rank's."""
    ours = {id(weight) for weight in _weights(optimizer)}
    states = [v for v in optimizer.variables if id(v) not in ours]
    slots = [v for v in states if len(v.shape) and "float" in str(v.dtype)]
    name = f"keras_dist.slots.{optimizer._averaging.number}"
    means = _weighted_sums([slot.value for slot in slots], 1 / comm.size(), name)
    for slot, mean in zip(slots, means, strict=True):
        slot.assign(mean)
    numbers = [v for v in states if not len(v.shape)]
    for number, value in zip(
        numbers, comm.broadcast([n.numpy() for n in numbers]), strict=True
    ):
        number.assign(value)


def _weighted_sums(tensors: Sequence[Any], fraction: Any, name: str) -> list[Any]:
    """Sums of tensor × fraction over all ranks, in the dtypes of the tensors."""
    result: list[Any] = [None] * len(tensors)
    wires = [tf.float64 if t.dtype == tf.float64 else tf.float32 for t in tensors]
    for wire in sorted(set(wires), key=str):
        indices = [index for index, own in enumerate(wires) if own == wire]
        sums = comm.sum_tensors(
            [tf.cast(tensors[p], wire) * tf.cast(fraction, wire) for p in indices],
            name=f"{name}.{wire.name}",
            dtype=wire,
        )
        for index, summed in zip(indices, sums, strict=True):
            result[index] = tf.cast(summed, tensors[index].dtype)
    return result


def _weights(optimizer: Any) -> list[Any]:
    local = optimizer._averaging.options.local_ids()
    return [
        weight
        for leaf in leaves(optimizer)
        for weight in private.trainable_variables_of(leaf)
        if id(weight) not in local
    ]


def _variable(value: Any) -> Any:
    return own_variable(value)
