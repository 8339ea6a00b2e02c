"""How gradients are averaged as Horovod does, and a gradient tape that does so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist import comm, mixin
from keras_dist.horovod.collectives import (
    Average,
    Compression,
    Sum,
    mark_reduced,
    no_autograph,
    reduction,
)
from keras_dist.optimizer import Averaging, with_shape
from keras_dist.optimizer.reduce import exchange


@dataclass(frozen=True)
class Settings:
    """How gradients are averaged, checked.

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
    local = [_prepared(gradients[i], variables[i], settings) for i in indices]
    options = Averaging(
        op="sum" if settings.op == Sum else "average",
        compression="fp16" if settings.compression is Compression.fp16 else None,
    )
    key = tuple(id(variables[index]) for index in indices)
    name = comm.name_by("horovod.gradients", key)
    reduced = exchange(local, 1, options, is_merged=True, name=name)
    for index, gradient in zip(indices, reduced, strict=True):
        result[index] = mark_reduced(tf.cast(gradient, gradients[index].dtype))
    return result


def _prepared(gradient: Any, variable: Any, settings: Settings) -> Any:
    gradient = with_shape(gradient, variable)
    return tf.convert_to_tensor(gradient) if settings.sparse_as_dense else gradient


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
    """Make the gradients of a tape those of all ranks.

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
    """Mixin for a tape: its gradients are those of all ranks."""

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
