"""Read rows of arrays by index, inside a `tf.data.Dataset`."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def reader_of(arrays: Any) -> Callable[[tf.Tensor], Any]:
    """A function that returns the rows of all arrays at given indices.

    Arrays in memory are converted to tensors once. Memory-mapped files stay on disk,
    and only the requested rows are read.

    Args:
        arrays: Arrays with the same number of rows, or `None`, in any structure.

    Returns:
        A function of a tensor of row indices. It returns these rows, in the structure
        of `arrays` and in the dtypes that Keras would use.
    """
    readers = keras.tree.map_structure(
        lambda leaf: None if leaf is None else _leaf_reader(leaf),
        keras.tree.lists_to_tuples(arrays),
    )

    @tf.autograph.experimental.do_not_convert
    def read(rows: tf.Tensor) -> Any:
        return keras.tree.map_structure(
            lambda reader: None if reader is None else reader(rows), readers
        )

    return read


def _leaf_reader(leaf: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    if isinstance(leaf, np.memmap):
        return lambda rows: _from_disk(leaf, rows)
    tensor = _in_keras_dtype(tf.convert_to_tensor(leaf))
    return lambda rows: tf.gather(tensor, rows)


def _from_disk(leaf: np.memmap, rows: tf.Tensor) -> tf.Tensor:
    values = tf.numpy_function(
        lambda indices: np.asarray(leaf[indices]), [rows], tf.as_dtype(leaf.dtype)
    )
    return _in_keras_dtype(tf.ensure_shape(values, [None, *leaf.shape[1:]]))


def _in_keras_dtype(tensor: tf.Tensor) -> tf.Tensor:
    """In the dtype that Keras converts arrays to: floats become `floatx`."""
    if tensor.dtype.is_floating:
        return tf.cast(tensor, keras.config.floatx())
    return tensor
