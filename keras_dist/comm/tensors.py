"""Collectives of tensors, in a graph or not, that the training itself is made of."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from keras_dist.comm import runtime, transport

# From so many bytes on a tensor travels alone, and at most so many tensors do: however
# many layers there are, the number of collectives has a limit.
_LARGE = 4 * 2**20
_MOST_ALONE = 16

# How many collectives of each kind a graph has.
_counts: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def sum_tensors(tensors: Sequence[Any], *, name: str, dtype: Any) -> list[Any]:
    """Sums of many tensors over all ranks: one collective, and one for each large one.

    Args:
        tensors: Tensors of static or dynamic shape, of any float or integer dtype.
        name: Name of the collectives: fixed and the same on all ranks, since Horovod
            matches by name and waits for ever for one that some rank calls otherwise.
        dtype: Dtype on the wire, in which the sum is taken.

    Returns:
        Tensors of dtype `dtype`, in the order and the shapes of `tensors`.
    """
    link, _ = runtime.connection()
    tensors = [tf.cast(tensor, dtype) for tensor in tensors]
    if link is None or not tensors:
        return tensors
    result: list[Any] = [None] * len(tensors)
    alone = _large(tensors)
    for index in alone:
        result[index] = transport.allreduce_sum(
            link, tensors[index], name=f"{name}.large.{index}"
        )
    indices = [index for index in range(len(tensors)) if index not in alone]
    others = [tensors[index] for index in indices]
    if others:
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in others], axis=0)
        total = transport.allreduce_sum(link, flat, name=name)
        pieces = tf.split(total, [_num_elements(tensor) for tensor in others])
        for index, part, tensor in zip(indices, pieces, others, strict=True):
            shape = tensor.shape if _is_static(tensor) else tf.shape(tensor)
            result[index] = tf.reshape(part, shape)
    return result


def _large(tensors: Sequence[Any]) -> set[int]:
    """Places of those that are worth a collective of their own, at most so many.

    To pack them into one buffer and out of it again moves all of their bytes twice; and
    each can be on its way as soon as it is there.
    """
    sizes = {
        index: math.prod(tensor.shape) * tensor.dtype.size
        for index, tensor in enumerate(tensors)
        if _is_static(tensor)
    }
    large = [index for index in sizes if sizes[index] >= _LARGE]
    return set(sorted(large, key=lambda index: -sizes[index])[:_MOST_ALONE])


def stack(tensor: Any, *, verb: str) -> Any:
    """Tensors of one shape of all ranks, as rows of one; inside a graph or not.

    Args:
        tensor: The same shape and dtype on every rank.
        verb: What it is for: part of the collective's name.
    """
    link, _ = runtime.connection()
    if link is None:
        return tensor[tf.newaxis]
    return transport.allgather(link, tensor[tf.newaxis], name=name_of(verb))


def total(tensor: Any, *, verb: str) -> Any:
    """Sum of a float tensor over all ranks; inside a graph or not."""
    link, _ = runtime.connection()
    if link is None:
        return tensor
    return transport.allreduce_sum(link, tensor, name=name_of(verb))


def gather_rows(tensor: Any, *, name: str) -> Any:
    """Tensors of all ranks, joined along their first axis; inside a graph or not."""
    link, _ = runtime.connection()
    if link is None:
        return tensor
    return transport.allgather(link, tensor, name=name)


def adaptive_sum(tensor: Any, *, name: str) -> Any:
    """Adasum of a tensor over all ranks; inside a graph or not."""
    link, _ = runtime.connection()
    return (
        tensor if link is None else transport.allreduce_adasum(link, tensor, name=name)
    )


def name_of(verb: str) -> str:
    """A name that is the same on every rank, however often each one traced before.

    In a graph collectives of one kind are numbered in the order in which they are
    traced, since several may be under way at once.
    """
    if tf.executing_eagerly():
        return f"keras_dist.{verb}"
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph  # from a branch to the function that it is in
    counts = _counts.setdefault(graph, Counter())
    counts[verb] += 1
    return f"keras_dist.{verb}.{counts[verb]}"


def _is_static(tensor: Any) -> bool:
    return tensor.shape.is_fully_defined()


def _num_elements(tensor: Any) -> Any:
    if _is_static(tensor):
        return math.prod(tensor.shape)
    return tf.size(tensor)
