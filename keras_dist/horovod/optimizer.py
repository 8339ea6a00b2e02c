"""Optimizers and tapes that average as Horovod's do, and its batch normalization."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.horovod.collectives import (
    Average,
    Compression,
    Sum,
    mark_reduced,
    no_autograph,
    reduction,
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
from keras_dist.optimizer.reduce import exchange
from keras_dist.training.batch_norm import GlobalMoments


@dataclass(frozen=True)
class Settings:
    """Checked options of the average of gradients.

    Args:
        op: `Average` or `Sum`.
        compression: `Compression.none` or `Compression.fp16`.
        sparse_as_dense: Whether gradients of an `Embedding` are sent whole.
        passes: Batches whose gradients are added before they are averaged.
        is_mean_of_passes: Whether their sum is divided by the number of batches.

    Raises:
        ValueError: If an option cannot be used.
    """

    op: int = Average
    compression: Compression = Compression.none
    sparse_as_dense: bool = False
    passes: int = 1
    is_mean_of_passes: bool = False

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum):
            raise ValueError(
                "`op` of gradients must be hvd.Average or hvd.Sum. "
                f"Received: op={self.op!r}"
            )
        if not isinstance(self.compression, Compression):
            raise ValueError(
                "`compression` must be hvd.Compression.none or hvd.Compression.fp16. "
                f"Received: compression={self.compression!r}"
            )
        if not isinstance(self.passes, int) or self.passes < 1:
            raise ValueError(
                "`backward_passes_per_step` must be a whole number of at least 1. "
                f"Received: backward_passes_per_step={self.passes!r}"
            )


def check_all_ranks(process_set: Any) -> None:
    """Check that gradients or metrics are asked for of all ranks.

    Raises:
        ValueError: If a process set is given that is not Horovod's global one.
    """
    if process_set is not None and process_set.process_set_id != 0:
        raise ValueError(
            "All ranks train one model, so gradients and metrics are averaged over all "
            f"ranks. Received: process_set={process_set}. Leave it out, and start a "
            "job for each model."
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
    result = _copy(optimizer)
    average(result, settings)
    return result


def _copy(optimizer: Any) -> Any:
    """Make a plain optimizer with the options and the state of this one."""
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


@dataclass
class Passes:
    """What an optimizer remembers between batches.

    Args:
        sums: Sums of gradients since the last update, by the identity of the variable.
        count: How many gradients they are sums of; a variable, or `None` before.
    """

    sums: dict[int, Any] = field(default_factory=dict)
    count: Any = None


@functools.cache
def _mixin_with(settings: Settings) -> type:
    # A class has the settings, since its `from_config` has to know them.
    return type("AveragesLikeHorovod", (AveragesLikeHorovod,), {"_settings": settings})


def average(optimizer: Any, settings: Settings) -> None:
    """Change an optimizer in place so that it averages as Horovod's does."""
    for part in nested_optimizers(optimizer):
        if mixin.has(part, AveragesLikeHorovod):
            mixin.remove(part, _mixin_with(part._settings))
    mixin.add(optimizer, _mixin_with(settings))
    _begin(optimizer)


def averages(optimizer: Any) -> bool:
    """Return True if an optimizer, or one inside of it, averages like Horovod's."""
    parts = nested_optimizers(optimizer)
    return any(mixin.has(part, AveragesLikeHorovod) for part in parts)


def average_outermost(optimizer: Any) -> None:
    """Move averaging from an inner optimizer to the outermost one.

    A `LossScaleOptimizer` does not call the inner one on a rank with an inf.
    """
    for part in nested_optimizers(optimizer)[1:]:
        if mixin.has(part, AveragesLikeHorovod):
            passes = part._passes
            average(optimizer, part._settings)
            object.__setattr__(optimizer, "_passes", passes)


def is_next_an_update(optimizer: Any) -> bool:
    """Return True if the next batch ends with an update."""
    if not mixin.has(optimizer, AveragesLikeHorovod):
        return True
    count = optimizer._passes.count
    return (0 if count is None else int(count)) == optimizer._settings.passes - 1


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
        if passes.count is None:
            passes.count = tf.Variable(0, trainable=False)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None and id(variable) not in passes.sums:
                zeros = tf.zeros(tuple(variable.shape), gradient.dtype)
                passes.sums[id(variable)] = tf.Variable(zeros, trainable=False)
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


def reduce_gradients(
    gradients: Sequence[Any], variables: Sequence[Any], settings: Settings
) -> list[Any]:
    """Average or add the gradients of all ranks.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or `None`. One that is the same on all
            ranks already, since an `allreduce` or a tape has returned it, is kept.
        variables: The variables of the gradients.
        settings: How to average.

    Returns:
        Tensors, and `None`.
    """
    result = list(gradients)
    indices = [
        index
        for index, gradient in enumerate(gradients)
        if gradient is not None
        and not getattr(gradient, "_keras_dist_is_reduced", False)
    ]
    if comm.size() == 1 or not indices:
        return result
    local = [with_shape(gradients[i], variables[i]) for i in indices]
    if settings.sparse_as_dense:
        local = [tf.convert_to_tensor(gradient) for gradient in local]
    options = Averaging(
        op="sum" if settings.op == Sum else "average",
        compression="fp16" if settings.compression is Compression.fp16 else None,
    )
    key = tuple(id(variables[index]) for index in indices)
    name = comm.name_of("horovod.gradients", key)
    reduced = exchange(local, 1, options, is_merged=True, name=name)
    for index, gradient in zip(indices, reduced, strict=True):
        result[index] = mark_reduced(tf.cast(gradient, gradients[index].dtype))
    return result


def DistributedGradientTape(  # noqa: N802 - Horovod's own name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Let a tape return gradients averaged over all ranks.

    An optimizer of this module does not average them again.

    Args:
        gradtape: A `tf.GradientTape`, which is changed in place.
        compression: `Compression.fp16` sends two bytes a number.
        sparse_as_dense: Whether to send gradients of an `Embedding` whole.
        op: `Average` or `Sum`.
        process_set: All ranks only.
        device_dense, device_sparse, gradient_predivide_factor, num_groups, groups,
            scale_local_gradients: Not used: they say how Horovod sends gradients.

    Returns:
        The same tape.

    Raises:
        ValueError: If an option cannot be used.

    Example:

    >>> x = tf.Variable(3.0)
    >>> with DistributedGradientTape(tf.GradientTape()) as tape:
    ...     y = x * x
    >>> float(tape.gradient(y, x))
    6.0
    """
    check_all_ranks(process_set)
    settings = Settings(reduction(op), compression, sparse_as_dense)
    comm.init()
    gradtape._settings = settings
    mixin.add(gradtape, ReducesTape)
    return gradtape


class ReducesTape:
    """Mixin for a tape that averages its gradients over all ranks."""

    _settings: Settings

    @no_autograph
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Gradients of `target`, over all ranks, in the structure of `sources`."""
        del use_generic_names  # our names never depend on those of variables
        local = super().gradient(target, sources, output_gradients, *args, **kwargs)  # type: ignore[misc]
        variables, flat = tf.nest.flatten(sources), tf.nest.flatten(local)
        reduced = reduce_gradients(flat, variables, self._settings)
        return tf.nest.pack_sequence_as(sources, reduced)


@keras.saving.register_keras_serializable(package="keras_dist.horovod")
class SyncBatchNormalization(GlobalMoments, keras.layers.BatchNormalization):
    """`BatchNormalization` whose mean and variance are those of the rows of all ranks.

    Args:
        fused: Only `False`.
        **kwargs: Arguments of `keras.layers.BatchNormalization`.

    Raises:
        ValueError: If `fused` is `True` or `None`.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), SyncBatchNormalization()])
    >>> model.output_shape
    (None, 2)
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError(
                "SyncBatchNormalization cannot be fused. Received: fused="
                f"{fused}. Leave it out."
            )
        super().__init__(**kwargs)
