"""Optimizers that average as Horovod's do, and add the gradients of batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.horovod.collectives import (
    Average,
    Compression,
    no_autograph,
    reduction,
)
from keras_dist.horovod.gradients import (
    Settings,
    check_all_ranks,
    reduce_gradients,
)
from keras_dist.optimizer import (
    Averaging,
    AveragingState,
    ReducesGradients,
    leaves,
    nested_optimizers,
    step_context,
    update,
    variables_of,
    with_shape,
)


def DistributedOptimizer(  # noqa: N802 - Horovod's own name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that averages its gradients over the ranks.

    Each rank counts the same, whatever rows it has. It averages wherever Keras or a
    script calls `apply` or `apply_gradients`, but for gradients that an `allreduce` or
    a `DistributedGradientTape` has returned.

    Args:
        optimizer: A Keras optimizer, which stays as it is.
        compression: `Compression.fp16` sends two bytes a number.
        sparse_as_dense: Whether to send gradients of an `Embedding` whole; by default
            they are sent as rows if that is smaller.
        op: `Average` or `Sum`.
        backward_passes_per_step: Batches whose gradients are added before they are
            averaged. `iterations` counts batches.
        average_aggregated_gradients: Whether to divide that sum by their number.
        process_set: All ranks only.
        name, device_dense, device_sparse, gradient_predivide_factor, num_groups,
            groups, scale_local_gradients: Not used: they say how Horovod sends
            gradients.

    Returns:
        An optimizer of the same class, name and state.

    Raises:
        TypeError: If `optimizer` is not a Keras optimizer.
        ValueError: If an option cannot be used.

    Example:

    >>> optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3))
    >>> optimizer.__class__ is keras.optimizers.Adam
    True
    """
    check_all_ranks(process_set)
    settings = Settings(
        reduction(op),
        compression,
        sparse_as_dense,
        backward_passes_per_step,
        average_aggregated_gradients,
    )
    comm.init()
    return average(_copied(optimizer), settings)


def _copied(optimizer: Any) -> Any:
    """A plain optimizer with the options and the state of this one."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "hvd.DistributedOptimizer needs a Keras optimizer, such as "
            f"keras.optimizers.Adam(). Received: {optimizer!r} of type "
            f"{type(optimizer).__name__}"
        )
    try:
        copied = optimizer.__class__.from_config(optimizer.get_config())
    except Exception:  # for example a rate of a class that Keras does not know
        return optimizer  # and is then changed in place
    if optimizer.built:
        copied.build(private.trainable_variables_of(optimizer))
        for pair in zip(copied.variables, optimizer.variables, strict=True):
            pair[0].assign(pair[1])
    return copied


_classes: dict[Settings, type] = {}


@dataclass
class Passes:
    """What an optimizer remembers between batches.

    Args:
        sums: Sums of gradients since the last update, by the identity of the variable.
        count: How many gradients they are sums of; a variable, or `None` before.
    """

    sums: dict[int, Any] = field(default_factory=dict)
    count: Any = None

    def prepare(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Make what is not there yet."""
        if self.count is None:
            self.count = tf.Variable(0, trainable=False)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None and id(variable) not in self.sums:
                zeros = tf.zeros(tuple(variable.shape), gradient.dtype)
                self.sums[id(variable)] = tf.Variable(zeros, trainable=False)


def average(optimizer: Any, settings: Settings) -> Any:
    """Change an optimizer in place so that it averages as Horovod's does."""
    if settings not in _classes:
        _classes[settings] = type(
            "AveragesLikeHorovod", (AveragesLikeHorovod,), {"_settings": settings}
        )
    for part in nested_optimizers(optimizer):
        if settings_of(part) is not None:
            mixin.remove(part, _classes[part._settings])
    mixin.add(optimizer, _classes[settings])
    _begin(optimizer)
    return optimizer


def settings_of(optimizer: Any) -> Settings | None:
    """Return how an optimizer averages; `None` if not like Horovod's."""
    is_ours = mixin.has(optimizer, AveragesLikeHorovod)
    return optimizer._settings if is_ours else None


def averages(optimizer: Any) -> bool:
    """Tell whether an optimizer, or one inside of it, averages like Horovod's."""
    return any(settings_of(part) for part in nested_optimizers(optimizer))


def average_outermost(optimizer: Any) -> None:
    """Move averaging from an inner optimizer to the outermost one.

    A `LossScaleOptimizer` does not call the inner one on a rank with an inf.
    """
    for part in nested_optimizers(optimizer)[1:]:
        settings = settings_of(part)
        if settings is not None:
            passes = part._passes
            average(optimizer, settings)
            object.__setattr__(optimizer, "_passes", passes)


def is_next_an_update(optimizer: Any) -> bool:
    """Tell whether the next batch ends with an update."""
    settings = settings_of(optimizer)
    if settings is None or settings.passes == 1:
        return True
    count = optimizer._passes.count
    return (0 if count is None else int(count)) == settings.passes - 1


def _begin(optimizer: Any) -> None:
    # Keras does not track attributes that are set so; it would save them.
    object.__setattr__(optimizer, "_passes", Passes())
    # `dist_fit` averages by this, by its own rules.
    object.__setattr__(optimizer, "_averaging", AveragingState(Averaging()))


class AveragesLikeHorovod(ReducesGradients):
    """Mixin for the outermost optimizer: average as Horovod does, then update."""

    _settings = Settings()
    _passes: Passes

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        args = () if custom_objects is None else (custom_objects,)
        made = super().from_config(config, *args)  # type: ignore[misc]
        _begin(made)
        return made

    @no_autograph
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if step_context.is_inside():  # of `dist_fit`, or of an optimizer around this
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        own_apply = super(ReducesGradients, self).apply  # type: ignore[misc]
        grads, known = list(grads), variables_of(self, trainable_variables)
        if self._settings.passes > 1:
            _add(self, grads, known, own_apply, trainable_variables)
        elif grads:
            averaged = reduce_gradients(grads, known, self._settings)
            update(self, own_apply, averaged, trainable_variables)
        return None


def _add(
    optimizer: Any,
    gradients: list[Any],
    variables: list[Any],
    apply: Any,
    trainable_variables: Any,
) -> None:
    """Add a batch's gradients to those before; average and update if it is time."""
    settings: Settings = optimizer._settings
    passes: Passes = optimizer._passes
    with tf.init_scope():
        if not optimizer.built:
            optimizer.build(variables)
        passes.prepare(gradients, variables)
    sums = [
        None if gradient is None else passes.sums[id(variable)]
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    shaped = [with_shape(*pair) for pair in zip(gradients, variables, strict=True)]
    for gradient, own_sum in zip(shaped, sums, strict=True):
        if own_sum is not None:
            own_sum.assign_add(tf.convert_to_tensor(gradient))
    count = passes.count.assign_add(1)

    def make_update() -> Any:
        added = [None if s is None else tf.identity(s.value()) for s in sums]
        averaged = reduce_gradients(added, variables, settings)
        if settings.is_mean_of_passes:
            averaged = [None if g is None else g / settings.passes for g in averaged]
        update(optimizer, apply, averaged, trainable_variables)
        for own_sum in sums:
            if own_sum is not None:
                own_sum.assign(tf.zeros_like(own_sum))
        passes.count.assign(0)
        return tf.constant(True)

    def only_count() -> Any:
        # Horovod counts batches, and so do the rates that depend on the count.
        for leaf in leaves(optimizer):
            private.batches_of(leaf).assign_add(1)
        return tf.constant(False)

    tf.cond(tf.equal(count, settings.passes), make_update, only_count)
