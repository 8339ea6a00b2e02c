"""Collectives of tensors that work eagerly and inside a `tf.function`."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from keras_dist.comm import runtime, transport

# Tensors of at least this many bytes get an allreduce of their own; at most this many
# tensors do, so that the number of collectives does not grow with the number of layers.
_LARGE = 4 * 2**20
_MOST_SEPARATE = 16

# For each graph, the number of collectives of each kind traced in it so far.
_counts: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()

# And the numbers of the keys of each kind that were traced in it.
_keys: WeakKeyDictionary[Any, dict[str, dict[Hashable, int]]] = WeakKeyDictionary()


def sum_tensors(tensors: Sequence[Any], *, name: str, dtype: Any) -> list[Any]:
    """Sum many tensors over all ranks, packed into one allreduce.

    Large tensors are not packed; each has an allreduce of its own.

    Args:
        tensors: Tensors of static or dynamic shape, of any float or integer dtype.
        name: Name of the collectives, fixed and the same on all ranks. Horovod matches
            the collectives of the ranks by name; ranks with different names wait for
            ever.
        dtype: The tensors are cast to this dtype, sent in it and summed in it.

    Returns:
        Tensors of dtype `dtype`, in the order and the shapes of `tensors`.
    """
    link, _ = runtime.connection()
    tensors = [tf.cast(tensor, dtype) for tensor in tensors]
    if link is None or not tensors:
        return tensors
    result: list[Any] = [None] * len(tensors)
    large = _large_indices(tensors)
    for index in large:
        result[index] = transport.allreduce_sum(
            link, tensors[index], name=f"{name}.large.{index}"
        )
    indices = [index for index in range(len(tensors)) if index not in large]
    small = [tensors[index] for index in indices]
    if small:
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in small], axis=0)
        total = transport.allreduce_sum(link, flat, name=name)
        sums = tf.split(total, [_num_elements(tensor) for tensor in small])
        for index, own_sum, tensor in zip(indices, sums, small, strict=True):
            shape = tensor.shape if _is_static(tensor) else tf.shape(tensor)
            result[index] = tf.reshape(own_sum, shape)
    return result


def _large_indices(tensors: Sequence[Any]) -> set[int]:
    """Indices of the tensors that get a collective of their own: the largest ones.

    Packing copies all bytes of a tensor twice, into the buffer and out of it. And a
    tensor with its own collective can be sent as soon as it is computed.
    """
    sizes = {
        index: math.prod(tensor.shape) * tensor.dtype.size
        for index, tensor in enumerate(tensors)
        if _is_static(tensor)
    }
    large = [index for index in sizes if sizes[index] >= _LARGE]
    return set(sorted(large, key=lambda index: -sizes[index])[:_MOST_SEPARATE])


def stack(tensor: Any, *, purpose: str) -> Any:
    """Stack the tensors of all ranks along a new first axis, in rank order.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        purpose: Part of the collective's name: what the collective is for.
    """
    link, _ = runtime.connection()
    if link is None:
        return tensor[tf.newaxis]
    return transport.allgather(link, tensor[tf.newaxis], name=name_of(purpose))


def total(tensor: Any, *, purpose: str) -> Any:
    """Sum of a float tensor over all ranks.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        purpose: Part of the collective's name: what the collective is for.
    """
    link, _ = runtime.connection()
    if link is None:
        return tensor
    return transport.allreduce_sum(link, tensor, name=name_of(purpose))


def gather_rows(tensor: Any, *, name: str) -> Any:
    """Concatenate the tensors of all ranks along their first axis, in rank order."""
    link, _ = runtime.connection()
    if link is None:
        return tensor
    if not tf.executing_eagerly():
        # TensorFlow computes what depends on constants alone while it traces, a
        # collective too, and not at the same time on all ranks. This is no constant.
        tensor = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
    return transport.allgather(link, tensor, name=name)


def adaptive_sum(tensor: Any, *, name: str) -> Any:
    """Adasum of a tensor over all ranks."""
    link, _ = runtime.connection()
    return (
        tensor if link is None else transport.allreduce_adasum(link, tensor, name=name)
    )


def name_of(purpose: str) -> str:
    """Name of a collective, the same on every rank however often it has traced before.

    Several collectives of a graph may run at once, so they need different names: those
    of one kind are numbered in the order in which they are traced.

    Args:
        purpose: What the collective is for.
    """
    if tf.executing_eagerly():
        return f"keras_dist.{purpose}"
    counts = _counts.setdefault(_outermost_graph(), Counter())
    counts[purpose] += 1
    return f"keras_dist.{purpose}.{counts[purpose]}"


def name_by(purpose: str, key: Hashable) -> str:
    """Name of a collective, the same on every rank, also where one rank traced twice.

    A function inside of another one is traced again if it has made variables, as only
    that rank's may do that has not loaded a model.

    Args:
        purpose: What the collective is for.
        key: What distinguishes it from others of this purpose in the same graph. They
            are numbered in the order in which they are traced first; outside of a graph
            all have the number 1.
    """
    if tf.executing_eagerly():
        return f"keras_dist.{purpose}.1"
    keys = _keys.setdefault(_outermost_graph(), {})
    numbers = keys.setdefault(purpose, {})
    return f"keras_dist.{purpose}.{numbers.setdefault(key, len(numbers) + 1)}"


def _outermost_graph() -> Any:
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph  # from a branch (`tf.cond`) to its function
    return graph


def _is_static(tensor: Any) -> bool:
    return tensor.shape.is_fully_defined()


def _num_elements(tensor: Any) -> Any:
    if _is_static(tensor):
        return math.prod(tensor.shape)
    return tf.size(tensor)
