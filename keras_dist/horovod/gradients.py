"""Average gradients as Horovod does: each rank counts the same."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist import comm
from keras_dist.horovod.collectives import is_reduced, mark_reduced
from keras_dist.horovod.ops import Average, Compression, ReduceOp, Sum
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
        kind = "fp16" if settings.compression is Compression.fp16 else None
        options = Averaging(settings.op.name, kind, sparse="merged")
        key = tuple(id(variables[index]) for index in shared)
        name = comm.name_by("horovod.gradients", key)
        everyone, _ = exchange(own, 1, options, name=name)
        for index, gradient in zip(shared, everyone, strict=True):
            dtype = gradients[index].dtype
            result[index] = mark_reduced(tf.cast(gradient, dtype))
        return result


def is_local(variable: Any, local: Collection[int]) -> bool:
    """Tell whether a variable of Keras, or TensorFlow's inside it, is local."""
    return id(variable) in local or id(getattr(variable, "_value", None)) in local


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
