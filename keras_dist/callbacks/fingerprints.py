"""Checksums of variables, to compare the bits of ranks."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# Elements that are processed at a time on a GPU, so that intermediate results stay
# small beside a model that fills the memory.
_PIECE = 2**24

_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def fingerprints(variables: Sequence[Any]) -> np.ndarray:
    """One int64 checksum a variable: equal if all bits are equal, also those of NaN.

    Only the checksums are copied to the host.
    """
    tensors = (tf.convert_to_tensor(variable.value) for variable in variables)
    prints = [
        checksum(tensor) if "CPU" in tensor.device else sum_of_bits(tensor)
        for tensor in tensors
    ]
    return np.array([int(number) for number in prints], np.int64)


def checksum(tensor: Any) -> int:
    """CRC-32 of a tensor in host memory, which is read without a copy."""
    return zlib.crc32(np.asarray(tensor).reshape(-1).view(np.uint8).data)


def sum_of_bits(tensor: Any) -> Any:
    """Checksum of a tensor on another device: the sum of its words × odd numbers.

    Sums wrap around at 64 bits. The sum changes if one bit of one word changes, or if
    two different words are swapped. The result is a tensor, and the host does not wait
    for it here.
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


@tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
def _weighted_sum(words: Any) -> Any:
    odd = 2 * tf.range(tf.size(words, tf.int64), dtype=tf.int64) + 1
    return tf.reduce_sum(words * odd)
