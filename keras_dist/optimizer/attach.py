"""Attach the reduction of gradients to optimizers: `DistributedOptimizer`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import keras

from keras_dist import comm, mixin
from keras_dist.optimizer import step_context
from keras_dist.optimizer.local_steps import after_update, uses_local_sgd
from keras_dist.optimizer.nested import nested_optimizers, optimizers_of, variables_of
from keras_dist.optimizer.options import (
    Averaging,
    Compression,
    Op,
    Sparse,
    check_usable,
)
from keras_dist.optimizer.reduce import (
    AveragingState,
    mark_recorded,
    reduce_gradients,
    weight_loss,
)
from keras_dist.optimizer.replaced_methods import replaced_methods
from keras_dist.optimizer.sparse import added_in_order, with_shape

# Optimizers are numbered in the order in which they are made to average, which is the
# same on all ranks. Horovod matches collectives by name, and Keras's names repeat.
_numbers = count()

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)


@dataclass
class Recorded:
    """A call of `apply` that was recorded, and not run.

    Args:
        optimizer: The optimizer.
        gradients: Of this rank's batch.
        variables: The variables of the gradients; `None`: all of the optimizer.
    """

    optimizer: Any
    gradients: Sequence[Any]
    variables: Sequence[Any] | None


def DistributedOptimizer(  # noqa: N802 - Horovod's own name
    optimizer: Optimizer,
    *,
    op: Op = "average",
    compression: Compression | None = None,
    local_layers: Sequence[keras.layers.Layer] = (),
    process_set: Sequence[int] | None = None,
    sparse: Sparse = "auto",
) -> Optimizer:
    """Make `optimizer` average its gradients over all ranks before each update.

    This is for scripts that call `model.fit` with the callbacks of this package, and
    for custom training loops; `dist_fit` does it itself. The gradients are averaged in
    `apply`, which every Keras train step and every custom loop calls. So clipping,
    weight decay and the check for inf see the average.

    The object is changed in place and keeps its state. Keras saves it as the plain
    optimizer that it was.

    Args:
        optimizer: A `keras.optimizers.Optimizer`. With mixed precision, the outermost
            one or the one given to `compile`.
        op: `"average"`, weighted by the rows of each rank if they are known; `"sum"`;
            or `"adasum"` (Maleki et al., 2021), which needs 2, 4, 8, … ranks that
            communicate over MPI.
        compression: `"fp16"` or `"bf16"`: float32 gradients are sent in two bytes a
            number, scaled so that none overflows, and summed in float32. `None`: they
            are sent uncompressed.
        local_layers: Local layers: each rank trains them on its own rows. Their
            gradients are weighted by rows, but not averaged.
        process_set: The ranks to average over, one of the groups given to
            `keras_dist.init`. `None`: all.
        sparse: `"auto"`: repeated rows of an `Embedding` reach the optimizer as on one
            process. `"merged"`: added up first. `"repeated"`: as `"auto"`, on GPUs too.

    Returns:
        The same object.

    Raises:
        TypeError: If `optimizer` is not a Keras optimizer, or `local_layers` are not
            layers.
        ValueError: If an option is unknown, or cannot be used here.

    Example:

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
    options = Averaging(op, compression, local_layers, process_set, sparse=sparse)
    check_usable(options)
    return _attach(optimizer, options)


def _attach(optimizer: Any, options: Averaging) -> Any:
    if not mixin.has(optimizer, ReducesGradients):
        state = AveragingState(next(_numbers), options)
        object.__setattr__(optimizer, "_averaging", state)
        mixin.add(optimizer, ReducesGradients)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Tell whether `optimizer`, or one inside it, averages its gradients."""
    return any(
        mixin.has(part, ReducesGradients) for part in nested_optimizers(optimizer)
    )


def averages_every_step(model: Any) -> bool:
    """Tell whether the gradients of `model` are averaged in each step."""
    states = [
        part._averaging
        for optimizer in optimizers_of(model)
        for part in nested_optimizers(optimizer)
        if mixin.has(part, ReducesGradients)
    ]
    return bool(states) and all(
        state.options.op == "average" and state.options.every == 1 for state in states
    )


def local_ids(model: Any) -> set[int]:
    """Identities of the variables of local layers and of the optimizer's slots.

    Keras does not record to which variable of the model a slot belongs, but the slot's
    name begins with that variable's path.
    """
    found: set[int] = set()
    for optimizer in optimizers_of(model):
        for part in nested_optimizers(optimizer):
            if not mixin.has(part, ReducesGradients):
                continue
            layers = part._averaging.options.local_layers
            local = [weight for layer in layers for weight in layer.weights]
            paths = tuple(weight.path.replace("/", "_") + "_" for weight in local)
            slots = [v for v in optimizer.variables if v.name.startswith(paths)]
            found |= {id(variable) for variable in [*local, *slots]}
    return found


def move_to_outermost(optimizer: Any) -> None:
    """Move averaging from an inner optimizer to the outermost one.

    With mixed precision, Keras wraps the user's optimizer in a `LossScaleOptimizer`,
    which does not call the inner `apply` on a rank with an inf. The other ranks would
    wait for it forever.
    """
    inside = [
        p for p in nested_optimizers(optimizer)[1:] if mixin.has(p, ReducesGradients)
    ]
    for part in inside:
        mixin.remove(part, ReducesGradients)
        _attach(optimizer, part._averaging.options)


@contextlib.contextmanager
def attached(optimizer: Any, options: Averaging) -> Iterator[None]:
    """Average the gradients of `optimizer` inside the block.

    Afterwards the optimizer is as before. If the user's `DistributedOptimizer` made it
    average, its own options are used, unless `options` differs from the defaults.
    """
    move_to_outermost(optimizer)
    was_plain = not mixin.has(optimizer, ReducesGradients)
    try:
        state: AveragingState = _attach(optimizer, options)._averaging
        before = state.options
        if options != Averaging():
            state.options, state.is_merged = options, None
        try:
            yield
        finally:
            state.options, state.progress, state.is_merged = before, None, None
    finally:
        if was_plain:
            mixin.remove(optimizer, ReducesGradients)


def apply_recorded(call: Recorded, averaged: Sequence[Any]) -> None:
    """Run a recorded call of `apply`, with averaged gradients."""
    variables = variables_of(call.optimizer, call.variables)
    shaped = [with_shape(*pair) for pair in zip(averaged, variables, strict=True)]
    update(call.optimizer, call.optimizer.apply, shaped, call.variables)


def only_attached() -> contextlib.AbstractContextManager[None]:
    """Inside the block, an update by an optimizer that does not average is an error.

    All optimizers that a model keeps do average. One that its train step has from
    elsewhere would let the ranks drift apart.
    """

    def apply(plain: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        is_averaged = step_context.current().is_averaged
        if not is_averaged and not mixin.has(optimizer, ReducesGradients):
            raise RuntimeError(
                "An optimizer that does not average its gradients updates weights in "
                f"a train step on {comm.size()} ranks. Received: {optimizer!r}, which "
                "the model does not keep. Make it an attribute of the model, also in "
                "a list, a dict or an object of your own; or pass it to "
                "keras_dist.DistributedOptimizer."
            )
        return plain(*args, **kwargs)

    return replaced_methods({(keras.optimizers.Optimizer, "apply"): apply})


def update(
    optimizer: Any, apply: Callable[..., Any], averaged: Any, variables: Any
) -> None:
    """Make the update; optimizers inside of this one get the averages, too."""
    context = replace(step_context.current(), is_averaged=True)
    with step_context.entered(context), added_in_order(optimizer, averaged):
        apply(averaged, variables)


class ReducesGradients:
    """Mixin for the outermost optimizer: average the gradients, then update."""

    def scale_loss(self, loss: Any) -> Any:
        loss = super().scale_loss(loss)  # type: ignore[misc]
        return weight_loss(self, loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        context = step_context.current()
        if context.recorded is not None:
            grads = mark_recorded(self, grads, trainable_variables)
            context.recorded.append(Recorded(self, grads, trainable_variables))
            return None
        apply = super().apply  # type: ignore[misc]
        if context.is_averaged or not grads:
            return apply(grads, trainable_variables)
        averaged = grads
        if comm.size() > 1:
            averaged = reduce_gradients(self, grads, trainable_variables)
        update(self, apply, averaged, trainable_variables)
        if uses_local_sgd(self):
            after_update(self)
        return None
