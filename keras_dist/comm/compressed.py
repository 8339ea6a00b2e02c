"""Allreduce with two bytes per number on the wire: float16 or bfloat16."""

import math
from typing import Any

import tensorflow as tf

from keras_dist.comm import runtime, transport

KINDS = {"fp16": tf.float16, "bf16": tf.bfloat16}

# Before a chunk is cast to float16, whose largest number is 65,504, it is scaled so
# that its largest number has this exponent. Sums are taken in float32 and then scaled
# again, so nothing overflows.
_LARGEST_EXPONENT = 14

# Length of the header before each chunk, in two-byte words: it holds two float32
# numbers, the exponent of the scale and one number of the sender.
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
    """Sum, or weighted mean, of a vector over all ranks, in two collectives.

    A reduce-scatter followed by an allgather: each rank sends chunk r of its vector to
    rank r (alltoall). Rank r adds the chunks in float32, in rank order, and sends the
    sum to all ranks (allgather). Each number is rounded twice, once per collective, and
    sums are never taken in two bytes. The two collectives send half the bytes of an
    allreduce in float32.

    Args:
        flat: Vector of float32, of the same length on all ranks.
        weight: Weight of this rank's vector, a scalar.
        kind: `"fp16"` or `"bf16"`. With `"fp16"` each chunk is scaled by a power of
            two so that its largest number fits; bfloat16 has the range of float32.
        name: Name of the collectives: fixed, and the same on all ranks.
        is_mean: Whether to divide by the sum of the weights.
        extra: One more number of this rank, sent in float32.

    Returns:
        The sum or mean of the vectors, the sum of the weights, and a vector of the
        extra numbers of all ranks.
    """
    link, world = runtime.connection()
    weight = tf.cast(weight, tf.float32)
    if link is None:
        return (flat if is_mean else flat * weight), weight, tf.stack([extra])
    length = math.prod(flat.shape)
    chunk_length = -(-length // world.size)
    padded = tf.pad(flat * weight, [[0, chunk_length * world.size - length]])
    sent = _encoded(tf.reshape(padded, [world.size, chunk_length]), weight, kind)
    received = transport.alltoall(link, sent, name=f"{name}.pieces")
    chunks, weights = _decoded(received, kind)
    total = tf.add_n(tf.unstack(chunks, world.size))
    total_weight = tf.reduce_sum(weights)
    if is_mean:
        total /= total_weight
    # The weights were sent with the first collective; now the header carries `extra`.
    sums = _encoded(total[tf.newaxis], tf.cast(extra, tf.float32), kind)
    gathered = transport.allgather(link, sums, name=f"{name}.sums")
    vectors, extras = _decoded(gathered, kind)
    vector = tf.reshape(vectors, [-1])[:length]
    return vector, total_weight, extras


def _encoded(chunks: Any, number: Any, kind: str) -> Any:
    """Encode rows of float32 as rows of two-byte words, with a header each.

    Args:
        chunks: The rows.
        number: One number for the header of every row.
        kind: `"fp16"` or `"bf16"`.

    Returns:
        A tensor whose dtype is float16 for both kinds, because Horovod does not know
        bfloat16.
    """
    largest = tf.reduce_max(tf.abs(chunks), axis=1)
    usable = tf.math.is_finite(largest) & (largest > 0)
    exponent = tf.math.floor(
        tf.math.log(tf.where(usable, largest, 1.0)) / math.log(2.0)
    )
    # An inf or NaN stays one, because it is looked for after the averaging.
    shift = tf.where(usable, _LARGEST_EXPONENT - exponent, 0.0)
    if kind == "bf16":
        shift = tf.zeros_like(shift)
    header = tf.stack([shift, tf.broadcast_to(number, tf.shape(shift))], axis=1)
    words = tf.cast(chunks * _power_of_two(shift)[:, tf.newaxis], KINDS[kind])
    return tf.concat(
        [
            tf.reshape(tf.bitcast(header, tf.float16), [-1, _HEADER]),
            tf.bitcast(words, tf.float16),
        ],
        axis=1,
    )


def _decoded(words: Any, kind: str) -> tuple[Any, Any]:
    """Decode what `_encoded` made: the rows of float32, and the number of each row."""
    header = tf.reshape(words[:, :_HEADER], [-1, _HEADER // 2, 2])
    header = tf.bitcast(header, tf.float32)
    numbers = tf.cast(tf.bitcast(words[:, _HEADER:], KINDS[kind]), tf.float32)
    return numbers / _power_of_two(header[:, 0])[:, tf.newaxis], header[:, 1]


def _power_of_two(exponent: Any) -> Any:
    """2 to the power of integers from −126 to 127: exact, made of the bits."""
    clipped = tf.clip_by_value(exponent, -126.0, 127.0)
    return tf.bitcast((tf.cast(clipped, tf.int32) + 127) * 2**23, tf.float32)
