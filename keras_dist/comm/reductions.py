"""Horovod's own reductions of one tensor, in a graph or outside of one."""

from typing import Any

import tensorflow as tf

from keras_dist.comm import runtime, transport
from keras_dist.comm.collectives import with_wire_dtype

# Attributes of Horovod's module by our names.
_OPS = {
    "average": "Average",
    "sum": "Sum",
    "min": "Min",
    "max": "Max",
    "product": "Product",
    "adasum": "Adasum",
}


def reduce(
    tensor: Any, op: str, *, name: str, before: float = 1.0, after: float = 1.0
) -> Any:
    """Combine the tensors of all ranks, element by element.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        op: `"average"`, unweighted; `"sum"`, `"min"`, `"max"`, `"product"`, `"adasum"`.
        name: Name of the collective, the same on all ranks.
        before: Factor on the tensor before the reduction.
        after: Factor on the result.

    Returns:
        A tensor of the same shape and dtype.
    """
    link, _ = runtime.connection()
    if link is None:
        return tensor if before == after == 1.0 else _scaled(tensor, before * after)
    factors = {"prescale_factor": before, "postscale_factor": after}
    return with_wire_dtype(
        _variable(tensor),
        lambda x: _allreduce(link, x, _OPS[op], factors, name=name),
    )


def scatter(tensor: Any, op: str, *, name: str) -> Any:
    """Combine the tensors of all ranks, and return this rank's rows of the result.

    Args:
        tensor: A tensor of the same shape and dtype on every rank, with rows.
        op: `"average"` or `"sum"`.
        name: Name of the collective, the same on all ranks.

    Returns:
        Consecutive rows; where they cannot be divided equally, the first ranks have one
        more.
    """
    link, _ = runtime.connection()
    if link is None:
        return tensor
    return with_wire_dtype(
        _variable(tensor), lambda x: _reducescatter(link, x, _OPS[op], name=name)
    )


def concatenate(tensor: Any, *, name: str) -> Any:
    """Concatenate the tensors of all ranks along their first axis, in rank order."""
    link, _ = runtime.connection()
    if link is None:
        return tensor
    return with_wire_dtype(
        _variable(tensor), lambda x: transport.allgather(link, x, name=name)
    )


def copy(tensor: Any, root_rank: int, *, name: str) -> Any:
    """Return the tensor of `root_rank` on every rank.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        root_rank: The rank whose tensor is sent, counted within the process set.
        name: Name of the collective, the same on all ranks.
    """
    link, _ = runtime.connection()
    if link is None:
        return tensor
    return with_wire_dtype(
        _variable(tensor),
        lambda x: transport.broadcast(link, x, root_rank=root_rank, name=name),
    )


def _variable(tensor: Any) -> Any:
    """The tensor, as something that TensorFlow does not compute while it traces."""
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def _scaled(tensor: Any, factor: float) -> Any:
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


@transport.collective
def _allreduce(link: Any, tensor: Any, op: str, factors: Any, *, name: str) -> Any:
    arguments = {**transport.common(link, name), **factors}
    return link.horovod.allreduce(tensor, op=getattr(link.horovod, op), **arguments)


@transport.collective
def _reducescatter(link: Any, tensor: Any, op: str, *, name: str) -> Any:
    arguments = transport.common(link, name)
    return link.horovod.reducescatter(tensor, op=getattr(link.horovod, op), **arguments)
