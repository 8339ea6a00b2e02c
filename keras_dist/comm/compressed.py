"""Allreduce with two bytes per number on the wire: float16 or bfloat16."""

import math
from typing import Any

import tensorflow as tf

from keras_dist.comm import runtime, transport

KINDS = {"fp16": tf.float16, "bf16": tf.bfloat16}

# Before numbers are cast to float16, whose largest is 65,504, they are scaled so that
# the largest has this exponent.
_LARGEST_EXPONENT = 14


def sum_compressed(flat: Any, largest: Any, *, kind: str, name: str) -> Any:
    """Sum a vector over all ranks, in two collectives of half the bytes of float32.

    A reduce-scatter followed by an allgather: each rank sends chunk r of its vector to
    rank r (alltoall). Rank r adds the chunks in float32, in rank order, and sends the
    sum to all ranks (allgather). Each number is rounded twice, once per collective, and
    sums are never taken in two bytes.

    Args:
        flat: Vector of float32, of the same length on all ranks.
        largest: The largest finite absolute value in the vectors of all ranks.
        kind: `"fp16"` or `"bf16"`. With `"fp16"` numbers are scaled by a power of two
            so that the largest one fits; bfloat16 has the range of float32.
        name: Name of the collectives: fixed, and the same on all ranks.
    """
    link, world = runtime.connection()
    if link is None:
        return flat
    exponent = tf.math.floor(tf.math.log(tf.maximum(largest, 2.0**-126)) / math.log(2))
    shift = _LARGEST_EXPONENT - exponent if kind == "fp16" else tf.zeros_like(exponent)
    length = math.prod(flat.shape)
    chunk_length = -(-length // world.size)
    padded = tf.pad(flat, [[0, chunk_length * world.size - length]])
    words = _encode(tf.reshape(padded, [world.size, chunk_length]), shift, kind)
    received = transport.alltoall(link, words, name=f"{name}.pieces")
    chunks = tf.unstack(_decode(received, shift, kind), world.size)
    # The sum of the largest numbers of all ranks fits, too.
    shift -= math.ceil(math.log2(world.size))
    words = _encode(tf.add_n(chunks)[tf.newaxis], shift, kind)
    sums = transport.allgather(link, words, name=f"{name}.sums")
    return tf.reshape(_decode(sums, shift, kind), [-1])[:length]


def _encode(numbers: Any, shift: Any, kind: str) -> Any:
    """Scale float32 by a power of two, and cast it to words of two bytes each.

    Their dtype is float16 for both kinds: Horovod does not know bfloat16.
    """
    return tf.bitcast(tf.cast(numbers * _power_of_two(shift), KINDS[kind]), tf.float16)


def _decode(words: Any, shift: Any, kind: str) -> Any:
    return tf.cast(tf.bitcast(words, KINDS[kind]), tf.float32) / _power_of_two(shift)


def _power_of_two(exponent: Any) -> Any:
    """2 to the power of integers from −126 to 127: exact, made of the bits."""
    clipped = tf.clip_by_value(exponent, -126.0, 127.0)
    return tf.bitcast((tf.cast(clipped, tf.int32) + 127) * 2**23, tf.float32)
