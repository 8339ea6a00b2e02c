"""How gradients are averaged as Horovod does, and a gradient tape that does so."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.horovod.collectives import is_reduced, mark_reduced, no_autograph
from keras_dist.horovod.ops import (
    Average,
    Compression,
    Compressor,
    ReduceOp,
    Sum,
    chosen,
)
from keras_dist.horovod.process_sets import ProcessSet, among, global_process_set
from keras_dist.optimizer import Averaging, with_shape
from keras_dist.optimizer.reduce import exchange


@dataclass(frozen=True)
class Settings:
    """How gradients are averaged, checked.

    Args:
        op: `Average` or `Sum`.
        compression: `Compression.none` or `Compression.fp16`.
        sparse_as_dense: Whether gradients of an `Embedding` are sent whole.
        process_set: The ranks to average over. Another rank keeps its own gradients.
        scale_local_gradients: Whether gradients of local variables are divided by the
            number of ranks.
        passes: Batches whose gradients are added before they are averaged.
        is_mean_of_passes: Whether their sum is divided by the number of batches.

    Raises:
        ValueError: If an option cannot be used.
    """

    op: ReduceOp = Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    passes: int = 1
    is_mean_of_passes: bool = False

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum):
            raise ValueError(
                "`op` of gradients must be hvd.Average or hvd.Sum. "
                f"Received: op={self.op!r}"
            )
        if self.compression not in (Compression.none, Compression.fp16):
            raise ValueError(
                "`compression` must be hvd.Compression.none or hvd.Compression.fp16. "
                f"Received: compression={self.compression!r}"
            )
        if not isinstance(self.passes, int) or self.passes < 1:
            raise ValueError(
                "`backward_passes_per_step` must be a whole number of at least 1. "
                f"Received: backward_passes_per_step={self.passes!r}"
            )


def check_groups(groups: Any, num_groups: int = 0) -> None:
    """Check the groups in which Horovod would send gradients; we send all together.

    Raises:
        ValueError: If they are neither a number nor a list.
    """
    groups = num_groups if groups is None and num_groups else groups
    if groups is None or isinstance(groups, list):
        return
    if not isinstance(groups, int) or groups <= 0:
        raise ValueError(
            "`groups` must be a positive number, or a list of lists of variables. "
            f"Received: groups={groups!r}"
        )


def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    settings: Settings,
    *,
    local: Collection[int] = (),
) -> list[Any]:
    """Average or add the gradients of all ranks.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or `None`. One that is the same on all
            ranks already, since an `allreduce` or a tape has returned it, is kept.
        variables: The variables of the gradients.
        settings: How to average.
        local: Identities of variables whose gradients stay each rank's own.

    Returns:
        Tensors, and `None`.
    """
    if not settings.process_set.included():
        return list(gradients)
    with among(settings.process_set):
        if comm.size() == 1:
            return list(gradients)
        result = list(gradients)
        for index, variable in enumerate(variables):
            if is_local(variable, local):
                result[index] = _local(gradients[index], settings)
        shared = [
            index
            for index, (gradient, variable) in enumerate(
                zip(gradients, variables, strict=True)
            )
            if gradient is not None
            and not is_reduced(gradient)
            and not is_local(variable, local)
        ]
        if not shared:
            return result
        own = [_prepared(gradients[i], variables[i], settings) for i in shared]
        op: Any = settings.op.name  # one of those of `Averaging`
        kind: Any = "fp16" if settings.compression is Compression.fp16 else None
        options = Averaging(op, kind, sparse="merged")
        key = tuple(id(variables[index]) for index in shared)
        name = comm.name_by("horovod.gradients", key)
        everyone, _ = exchange(own, 1, options, name=name)
        for index, gradient in zip(shared, everyone, strict=True):
            dtype = gradients[index].dtype
            result[index] = mark_reduced(tf.cast(gradient, dtype))
        return result


def layers_of(local_layers: Any) -> Sequence[Any]:
    """A list of layers.

    Raises:
        ValueError: If it holds something else.
    """
    if isinstance(local_layers, keras.layers.Layer):
        return [local_layers]
    layers = list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                "`local_layers` must be a layer or a list of layers. "
                f"Received: {layer!r} of type {type(layer).__name__}"
            )
    return layers


def is_local(variable: Any, local: Collection[int]) -> bool:
    """Tell whether a variable of Keras, or TensorFlow's inside it, is local."""
    return id(variable) in local or id(private.value_of(variable)) in local


def _prepared(gradient: Any, variable: Any, settings: Settings) -> Any:
    gradient = with_shape(gradient, variable)
    return tf.convert_to_tensor(gradient) if settings.sparse_as_dense else gradient


def _local(gradient: Any, settings: Settings) -> Any:
    if gradient is None or not settings.scale_local_gradients:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(comm.size(), gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(comm.size(), gradient.dtype)


def DistributedGradientTape(  # noqa: N802 - Horovod's own name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make the gradients of a tape those of all ranks.

    An optimizer of this module does not average them again.

    Args:
        gradtape: A `tf.GradientTape`, which is changed in place.
        device_dense, device_sparse: Not needed: taken for scripts that pass them.
        compression: `Compression.fp16` sends two bytes a number.
        sparse_as_dense: Whether to send gradients of an `Embedding` whole.
        op: `Average` or `Sum`.
        gradient_predivide_factor: Changes nothing but roundings; for `Average` only.
        num_groups, groups: Checked; they change nothing but how gradients are sent.
        process_set: The ranks to average over; the others keep their own gradients.
        scale_local_gradients: Whether gradients of local sources, registered by
            `register_local_source`, are divided by the number of ranks.

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
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            "`gradient_predivide_factor` is for hvd.Average only. Received: "
            f"gradient_predivide_factor={gradient_predivide_factor} and op={op!r}"
        )
    check_groups(groups, num_groups)
    settings = Settings(
        chosen(op), compression, sparse_as_dense, process_set, scale_local_gradients
    )
    comm.init()
    gradtape._reduction = _Reduction(settings)
    mixin.add(gradtape, ReducesTape)
    return gradtape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's own name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a `DistributedGradientTape` that leaves the gradients of some layers alone.

    Args:
        gradtape: A `tf.GradientTape`, which is changed in place.
        device_dense, device_sparse, compression, sparse_as_dense, op: As in
            `DistributedGradientTape`, with the arguments that follow.
        gradient_predivide_factor, num_groups, groups, process_set: As above.
        local_layers: A layer or a list of layers.
        scale_local_gradients: Whether their gradients are divided by the number of
            ranks.

    Returns:
        The same tape.

    Raises:
        ValueError: If an option cannot be used, or `local_layers` are not layers.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers_of(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


@dataclass
class _Reduction:
    """How a tape reduces gradients, and which stay each rank's own."""

    settings: Settings
    local_sources: list[Any] = field(default_factory=list)

    def local_ids(self) -> set[int]:
        return {id(source) for source in self.local_sources}


class ReducesTape:
    """Mixin for a tape: its gradients are those of all ranks."""

    _reduction: _Reduction

    def register_local_source(self, source: Any) -> None:
        """Keep the gradients of a variable each rank's own."""
        self._reduction.local_sources.append(source)

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
        own = super().gradient(target, sources, output_gradients, *args, **kwargs)  # type: ignore[misc]
        variables = keras.tree.flatten(sources)
        flat = [None] * len(variables)
        flat[:] = keras.tree.flatten(own) if len(variables) > 1 else [_only(own)]
        reduced = reduce_gradients(
            flat,
            variables,
            self._reduction.settings,
            local=self._reduction.local_ids(),
        )
        return keras.tree.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Pairs of source and gradient: those of local sources, and the others."""
        gradients = self.gradient(target, sources, output_gradients)
        local = self._reduction.local_ids()
        pairs = list(zip(sources, gradients, strict=True))
        return (
            [pair for pair in pairs if is_local(pair[0], local)],
            [pair for pair in pairs if not is_local(pair[0], local)],
        )


def _only(structure: Any) -> Any:
    while isinstance(structure, (list, tuple)):
        (structure,) = structure
    return structure
