"""A gradient tape whose gradients are those of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin
from keras_dist.horovod.collectives import no_autograph
from keras_dist.horovod.gradients import (
    Settings,
    check_groups,
    is_local,
    reduce_gradients,
)
from keras_dist.horovod.ops import Average, Compression, chosen
from keras_dist.horovod.optimizer import layers_of
from keras_dist.horovod.process_sets import ProcessSet, global_process_set


def DistributedGradientTape(  # noqa: N802 - Horovod's own name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
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
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
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
