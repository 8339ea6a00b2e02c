"""Collectives of several tensors, one after the other: we pack none of them."""

from collections.abc import Iterable
from typing import Any

from keras_dist.horovod.collectives import (
    allgather,
    allreduce,
    as_it_is,
    reducescatter,
)
from keras_dist.horovod.ops import Average, Compression
from keras_dist.horovod.process_sets import ProcessSet, global_process_set


@as_it_is
def grouped_allreduce(
    tensors: Iterable[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of each of several tensors, of any dtypes; a list.

    Args:
        tensors: The tensors.
        average, compression, op, prescale_factor, postscale_factor: As of `allreduce`.
        device_dense, device_sparse, ignore_name_scope, name: Not needed.
        process_set: The ranks that take part.
    """
    return [
        allreduce(
            tensor,
            None,
            average,
            prescale_factor,
            postscale_factor,
            op,
            compression,
            process_set=process_set,
        )
        for tensor in tensors
    ]


@as_it_is
def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of each of several tensors; a list.

    Args:
        tensors: The tensors.
        name, ignore_name_scope: Not needed.
        process_set: The ranks that take part.
    """
    return [allgather(tensor, process_set=process_set) for tensor in tensors]


@as_it_is
def grouped_reducescatter(
    tensors: Iterable[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of each of several tensors; a list.

    Args:
        tensors: The tensors.
        device_dense: Not needed.
        compression, op, prescale_factor, postscale_factor: As of `reducescatter`.
        process_set: The ranks that take part.
    """
    options: dict[str, Any] = {
        "compression": compression,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    return [reducescatter(tensor, None, op, **options) for tensor in tensors]
