"""Sums over the ranks that travel in two bytes a number."""

import math
from typing import Any

import tensorflow as tf

from keras_dist.comm import runtime, transport

KINDS = {"fp16": tf.float16, "bf16": tf.bfloat16}

# Numbers are brought to at most this before they become float16, whose largest is
# 65,504: a sum is taken in float32 and brought there again, so nothing overflows.
_LARGEST_EXPONENT = 14

# Words of two bytes before each piece: its exponent and one number, as float32.
_HEADER = 4


def sum_compressed(
    flat: Any,
    weight: Any,
    *,
    kind: str,
    name: str,
    is_mean: bool,
    extra: Any = 0.0,
) -> tuple[Any, Any, Any]:
    """Sum, or weighted mean, of a vector over all ranks, by two collectives.

    Each rank sends piece r of its vector to rank r, which adds the pieces in float32,
    in rank order, and sends the sum to all. Numbers are rounded twice on their way, and
    never added in two bytes; together they move half the bytes of a sum in float32.

    Args:
        flat: Vector of float32, of the same length on all ranks.
        weight: What this rank's vector counts, a scalar.
        kind: `"fp16"`, where each piece is scaled by a power of two so that its largest
            number fits, or `"bf16"`, which has the range of float32.
        name: Fixed, and the same on all ranks.
        is_mean: Whether to divide by the sum of the weights.
        extra: One more number of this rank, in float32.

    Returns:
        The vector, the sum of the weights, and that of the extra numbers.
    """
    link, world = runtime.connection()
    weight = tf.cast(weight, tf.float32)
    if link is None:
        return (flat if is_mean else flat * weight), weight, extra
    length = math.prod(flat.shape)
    piece = -(-length // world.size)
    padded = tf.pad(flat * weight, [[0, piece * world.size - length]])
    sent = _encoded(tf.reshape(padded, [world.size, piece]), weight, kind)
    received = transport.alltoall(link, sent, name=f"{name}.pieces")
    pieces, weights = _decoded(received, kind)
    total = tf.add_n(tf.unstack(pieces, world.size))
    weight_of_all = tf.reduce_sum(weights)
    if is_mean:
        total /= weight_of_all
    # The weights are known by now: their place in the header is free.
    sums = _encoded(total[tf.newaxis], tf.cast(extra, tf.float32), kind)
    everyone = transport.allgather(link, sums, name=f"{name}.sums")
    vectors, extras = _decoded(everyone, kind)
    vector = tf.reshape(vectors, [-1])[:length]
    return vector, weight_of_all, tf.reduce_sum(extras)


def _encoded(pieces: Any, number: Any, kind: str) -> Any:
    """Rows of float32 as rows of two-byte words, called float16 for Horovod."""
    largest = tf.reduce_max(tf.abs(pieces), axis=1)
    usable = tf.math.is_finite(largest) & (largest > 0)
    exponent = tf.math.floor(
        tf.math.log(tf.where(usable, largest, 1.0)) / math.log(2.0)
    )
    # An inf or nan stays one: the check for it comes after the averaging.
    shift = tf.where(usable, _LARGEST_EXPONENT - exponent, 0.0)
    if kind == "bf16":
        shift = tf.zeros_like(shift)
    header = tf.stack([shift, tf.broadcast_to(number, tf.shape(shift))], axis=1)
    words = tf.cast(pieces * _power_of_two(shift)[:, tf.newaxis], KINDS[kind])
    return tf.concat(
        [
            tf.reshape(tf.bitcast(header, tf.float16), [-1, _HEADER]),
            tf.bitcast(words, tf.float16),
        ],
        axis=1,
    )


def _decoded(words: Any, kind: str) -> tuple[Any, Any]:
    """Rows of float32 again, and the number in the header of each."""
    header = tf.reshape(words[:, :_HEADER], [-1, _HEADER // 2, 2])
    header = tf.bitcast(header, tf.float32)
    numbers = tf.cast(tf.bitcast(words[:, _HEADER:], KINDS[kind]), tf.float32)
    return numbers / _power_of_two(header[:, 0])[:, tf.newaxis], header[:, 1]


def _power_of_two(exponent: Any) -> Any:
    """2 to the power of whole numbers from −126 to 127, exactly: by its bits."""
    clipped = tf.clip_by_value(exponent, -126.0, 127.0)
    return tf.bitcast((tf.cast(clipped, tf.int32) + 127) * 2**23, tf.float32)
