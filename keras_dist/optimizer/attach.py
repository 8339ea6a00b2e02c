"""Attach the reduction of gradients to optimizers: `DistributedOptimizer`."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import keras

from keras_dist import comm, mixin
from keras_dist.optimizer import step_context
from keras_dist.optimizer.nested import (
    changes_updates,
    nested_optimizers,
    optimizers_of,
    variables_of,
)
from keras_dist.optimizer.reduce import (
    Averaging,
    AveragingState,
    Compression,
    Op,
    mark_recorded,
    reduce_gradients,
    weight_loss,
)
from keras_dist.optimizer.sparse import add_in_order, with_shape

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)


@dataclass
class Recorded:
    """A call of `apply` that was recorded, and not run.

    Args:
        optimizer: The optimizer.
        gradients: Of this rank's batch.
        variables: The variables of the gradients; `None`: all of the optimizer.
        is_sum: Whether the gradients are sums over rows.
        more: Further arguments, which an optimizer of the user's own may have.
        through: The optimizer's own `apply_gradients`, if that is called.
    """

    optimizer: Any
    gradients: Sequence[Any]
    variables: Sequence[Any] | None
    is_sum: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    through: Callable[..., Any] | None = None


def DistributedOptimizer(  # noqa: N802 - Horovod's own name
    optimizer: Optimizer,
    *,
    op: Op = "average",
    compression: Compression | None = None,
) -> Optimizer:
    """Make `optimizer` average its gradients over all ranks before each update.

    Use this in scripts that call `model.fit` with the callbacks of this package, and in
    custom training loops; `dist_fit` does it for you. The gradients are averaged in
    `apply`, which every Keras train step and every custom loop calls. So clipping,
    weight decay and the check for inf see the average.

    The object is changed in place and keeps its state. Keras saves it as the plain
    optimizer that it was.

    Args:
        optimizer: A `keras.optimizers.Optimizer`. With mixed precision, the outermost
            optimizer or the optimizer given to `compile`.
        op: `"average"`, weighted by the rows of each rank if they are known; or
            `"sum"`.
        compression: `"fp16"` or `"bf16"`: float32 gradients are sent in two bytes per
            number, scaled to avoid overflow, and summed in float32. `None`: they are
            sent uncompressed.

    Returns:
        The same object.

    Raises:
        TypeError: If `optimizer` is not a Keras optimizer.
        ValueError: If an option is unknown.

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
    _hand_on_averaging()
    options = Averaging(op, compression)
    _attach(optimizer, options)._averaging.options = options
    return optimizer


def _attach(optimizer: Any, options: Averaging) -> Any:
    if not mixin.has(optimizer, ReducesGradients):
        # The state of the last fit is part of the graph of its step.
        state = vars(optimizer).get("_averaging")
        if state is None or state.options != options:
            _set_options(optimizer, options)
        mixin.add(optimizer, ReducesGradients)
    return optimizer


def _set_options(optimizer: Any, options: Averaging) -> None:
    # Keras does not track attributes that are set so; it would save them.
    object.__setattr__(optimizer, "_averaging", AveragingState(options))


def check_again(model: Any) -> None:
    """Let all ranks compare gradients again: they trace a new train function."""
    for outermost in optimizers_of(model):
        for part in nested_optimizers(outermost):
            if mixin.has(part, ReducesGradients):
                _set_options(part, part._averaging.options)


def is_distributed(optimizer: Any) -> bool:
    """Return True if `optimizer`, or one inside it, averages its gradients."""
    return _find_options(optimizer) is not None


def averaging_of(model: Any) -> list[Averaging]:
    """List how the gradients of each optimizer of `model` are averaged in a fit."""
    found = map(_find_options, optimizers_of(model))
    return [options or Averaging() for options in found]


def averages_gradients(model: Any) -> bool:
    """Return True if the gradients of `model` are averaged, and not added up."""
    found = [*map(_find_options, optimizers_of(model))]
    return any(found) and all(o is None or o.op == "average" for o in found)


def _find_options(optimizer: Any) -> Averaging | None:
    """Find how an optimizer, or one inside it, averages; `None` if it does not."""
    for part in nested_optimizers(optimizer):
        if mixin.has(part, ReducesGradients):
            return part._averaging.options
    return None


@functools.cache
def _hand_on_averaging() -> None:
    """From now on, a `LossScaleOptimizer` averages in place of the one inside it.

    `compile` makes one with mixed precision, also for `train_on_batch`, where nothing
    else of this package is called before the step.
    """
    outer = keras.optimizers.LossScaleOptimizer
    plain = outer.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        move_to_outermost(self)

    mixin.set_method(outer, "__init__", init)


def move_to_outermost(optimizer: Any) -> None:
    """Move averaging from an inner optimizer to the outermost one.

    With mixed precision, Keras wraps the user's optimizer in a `LossScaleOptimizer`,
    which does not call the inner `apply` on a rank with an inf. The other ranks would
    wait for it forever.
    """
    for part in nested_optimizers(optimizer)[1:]:
        if mixin.has(part, ReducesGradients):
            mixin.remove(part, ReducesGradients)
            _attach(optimizer, part._averaging.options)


def attach_to(optimizer: Any) -> None:
    """Let `optimizer` average its gradients.

    One that the user's `DistributedOptimizer` has made average keeps its options.
    """
    move_to_outermost(optimizer)
    _attach(optimizer, Averaging())


def apply_recorded(call: Recorded, averaged: Sequence[Any]) -> None:
    """Run a recorded call of `apply`, with averaged gradients."""
    variables = variables_of(call.optimizer, call.variables)
    shaped = [with_shape(*pair) for pair in zip(averaged, variables, strict=True)]
    apply = functools.partial(call.through or call.optimizer.apply, **call.more)
    update(call.optimizer, apply, shaped, call.variables)


def only_attached() -> contextlib.AbstractContextManager[None]:
    """Context manager in which an update by an optimizer that does not average fails.

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

    return mixin.replace_method(keras.optimizers.Optimizer, "apply", apply)


def update(
    optimizer: Any, apply: Callable[..., Any], averaged: Any, variables: Any
) -> None:
    """Make the update; optimizers inside of this one get the averages, too."""
    context = replace(step_context.current(), is_averaged=True)
    with (
        step_context.enter(context),
        context.draw_common_numbers(),
        add_in_order(optimizer, averaged),
    ):
        apply(averaged, variables)


class ReducesGradients:
    """Mixin for the outermost optimizer: average the gradients, then update."""

    _averaging: AveragingState

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a copy that averages, too, with the default options."""
        made = super().from_config(*args, **kwargs)  # type: ignore[misc]
        _set_options(made, Averaging())
        return made

    def scale_loss(self, loss: Any) -> Any:
        loss = super().scale_loss(loss)  # type: ignore[misc]
        return weight_loss(self, loss)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **more: Any) -> Any:
        pairs, plain = list(grads_and_vars), super().apply_gradients  # type: ignore[misc]
        is_averaged = step_context.current().is_averaged
        if is_averaged or not (pairs and changes_updates(self)):
            return plain(pairs, *args, **more)

        def change(grads: Any, variables: Any, **more: Any) -> None:
            plain(list(zip(grads, variables, strict=True)), *args, **more)

        # It may change the gradients before it calls `apply`.
        self.apply(*zip(*pairs, strict=True), through=change, **more)
        return self.iterations  # type: ignore[attr-defined]

    def apply(
        self,
        grads: Any,
        trainable_variables: Any = None,
        *,
        through: Callable[..., Any] | None = None,
        **more: Any,
    ) -> Any:
        grads = list(grads)
        context = step_context.current()
        apply = functools.partial(through or super().apply, **more)  # type: ignore[misc]
        if context.is_averaged:
            return apply(grads, trainable_variables)
        is_sum = context.next_place("apply") in context.kinds.sums
        if context.recorded is not None:
            if context.trial is None:
                grads = mark_recorded(self, grads, trainable_variables)
            call = Recorded(self, grads, trainable_variables, is_sum, more, through)
            context.recorded.append(call)
            return None
        if not grads:
            return apply(grads, trainable_variables)
        averaged = reduce_gradients(self, grads, trainable_variables, is_sum=is_sum)
        update(self, apply, averaged, trainable_variables)
        return None
