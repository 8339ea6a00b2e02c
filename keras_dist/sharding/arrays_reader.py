"""Read rows of arrays inside a data set."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def reader_of(pieces: Any) -> Callable[[tf.Tensor], Any]:
    """A function from numbers of rows to these rows of each array, as Keras reads them.

    Arrays become tensors once. Memory-mapped files stay on disk, and only the rows
    that are asked for are read.

    Args:
        pieces: Arrays of one length, `None`, and structures of them.
    """
    readers = keras.tree.map_structure(
        lambda leaf: None if leaf is None else _reader(leaf),
        keras.tree.lists_to_tuples(pieces),
    )

    def read(rows: tf.Tensor) -> Any:
        return keras.tree.map_structure(
            lambda reader: None if reader is None else reader(rows), readers
        )

    return read


def _reader(leaf: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    if isinstance(leaf, np.memmap):
        return lambda rows: _from_disk(leaf, rows)
    tensor = _as_keras_reads(tf.convert_to_tensor(leaf))
    return lambda rows: tf.gather(tensor, rows)


def _from_disk(leaf: np.memmap, rows: tf.Tensor) -> tf.Tensor:
    found = tf.numpy_function(
        lambda indices: np.asarray(leaf[indices]), [rows], tf.as_dtype(leaf.dtype)
    )
    return _as_keras_reads(tf.ensure_shape(found, [None, *leaf.shape[1:]]))


def _as_keras_reads(tensor: tf.Tensor) -> tf.Tensor:
    """In the dtype that Keras gives to arrays: floats become `floatx`."""
    if tensor.dtype.is_floating:
        return tf.cast(tensor, keras.config.floatx())
    return tensor
