"""Numbers that tell whether two ranks hold the same bits."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# On a GPU so many numbers at a time, so that what is computed of them stays small
# beside a model that fills the memory.
_PIECE = 2**24

_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def fingerprints(variables: Sequence[Any]) -> np.ndarray:
    """One number a variable, int64: equal where all bits are, NaN or not.

    Nothing leaves the device that a variable is on but its number.
    """
    tensors = (tf.convert_to_tensor(variable.value) for variable in variables)
    prints = [
        checksum(tensor) if "CPU" in tensor.device else sum_of_bits(tensor)
        for tensor in tensors
    ]
    return np.array([int(number) for number in prints], np.int64)


def checksum(tensor: Any) -> int:
    """Of a tensor in the memory of the host, where it is read and not copied."""
    return zlib.crc32(np.asarray(tensor).reshape(-1).view(np.uint8).data)


def sum_of_bits(tensor: Any) -> Any:
    """Of a tensor on another device, which adds up its words, each × an odd number.

    Sums wrap around. A word that changes by one bit changes the sum, and so do two
    words that change places. What comes back is a tensor, which is not waited for.
    """
    words = tf.reshape(
        tf.cast(tensor, tf.int8) if tensor.dtype.is_bool else tensor, [-1]
    )
    total = tf.zeros([], tf.int64)
    for begin in range(0, int(words.shape[0]), _PIECE):
        piece = words[begin : begin + _PIECE]
        bits = tf.bitcast(piece, _INTEGERS[piece.dtype.size])
        total = 31 * total + _weighted_sum(tf.cast(bits, tf.int64))
    return total


@tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
def _weighted_sum(words: Any) -> Any:
    odd = 2 * tf.range(tf.size(words, tf.int64), dtype=tf.int64) + 1
    return tf.reduce_sum(words * odd)
