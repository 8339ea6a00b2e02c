"""Arrays, sharded by row: the order of the rows, and a data set of one rank's rows."""

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.batch_rows import BatchRows, change_batch, own_span, put_beside
from keras_dist.data.division import Division
from keras_dist.data.pipeline import as_untuned, assert_length, with_length

# Tensors that are not dense.
RAGGED_OR_SPARSE = (tf.RaggedTensor, tf.SparseTensor)


class Arrays:
    """Inputs, targets and sample weights of the same rows, as Keras takes them.

    Args:
        x: Array-like of shape `(rows, …)`, of pandas, NumPy, SciPy or TensorFlow, or a
            list, tuple or dict of them.
        y: The same for the targets, or `None`.
        sample_weight: The same for the weights, or `None`.

    Raises:
        ValueError: If the numbers of rows differ.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None) -> None:
        def convert(leaf: Any) -> Any:
            if is_scipy_sparse(leaf):
                return leaf.tocsr()  # of which rows can be sliced
            if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, np.memmap):
                return leaf
            if isinstance(leaf, frame) and any(map(is_cast, leaf.dtypes)):
                leaf = leaf.astype(floatx)  # as Keras, also columns of bool
            array = np.asarray(leaf)
            return array[:, None] if isinstance(leaf, series) else array  # as Keras

        def is_cast(dtype: Any) -> bool:
            return dtype.kind == "f" and dtype.name != floatx

        # Not imported here: without pandas there is no Series.
        pandas, floatx = sys.modules.get("pandas"), keras.config.floatx()
        frame, series = (getattr(pandas, n, ()) for n in ("DataFrame", "Series"))

        pieces = keras.tree.map_structure(convert, (x, y, sample_weight))
        self.x, self.y, self.sample_weight = pieces
        leaves = keras.tree.flatten(pieces)
        self.shapes = [tuple(leaf.shape) for leaf in leaves if leaf is not None]
        if len({shape[0] for shape in self.shapes}) != 1:
            raise ValueError(
                "All arrays must have the same number of rows. "
                f"Received: arrays of the shapes {self.shapes}"
            )
        self.num_rows = int(self.shapes[0][0])

    def pack(self) -> Any:
        """Return what a step is given: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Without `y` it is as in Keras: `x` itself, or `(x,)` if that is a list or tuple;
        weights are dropped.
        """
        weight = self.sample_weight
        is_one = weight is not None and not keras.tree.is_nested(weight)
        if is_one and keras.tree.is_nested(self.y):
            # Keras applies a single array of weights to all outputs.
            weight = keras.tree.map_structure(lambda _: self.sample_weight, self.y)
        return keras.utils.pack_x_y_sample_weight(self.x, self.y, weight)

    def read(self, indices: tf.data.Dataset) -> tf.data.Dataset:
        """Read the rows of each batch of indices; numbers beside it stay there.

        Arrays in memory are converted to tensors once. Memory-mapped files stay on
        disk, and only the requested rows are read. Rows come in the dtypes that Keras
        would use.
        """
        readers = keras.tree.map_structure(
            lambda leaf: None if leaf is None else _make_leaf_reader(leaf),
            keras.tree.lists_to_tuples(self.pack()),
        )

        def read(rows: tf.Tensor) -> Any:
            return keras.tree.map_structure(
                lambda reader: None if reader is None else reader(rows), readers
            )

        @tf.autograph.experimental.do_not_convert
        def read_batch(batch: Any) -> Any:
            return change_batch(batch, read)

        return indices.map(read_batch, tf.data.AUTOTUNE, deterministic=True)


def is_arrays(data: Any) -> bool:
    """Return True if `data` is an array-like, or a structure of array-likes only."""
    if data is None or isinstance(data, tf.data.Dataset):
        return False
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return bool(leaves) and all(
        hasattr(leaf, "shape")
        and (tf.is_tensor(leaf) or hasattr(leaf, "__array__") or is_scipy_sparse(leaf))
        and not isinstance(leaf, tf.SparseTensor)
        for leaf in leaves
    )


def is_scipy_sparse(leaf: Any) -> bool:
    """Return True if `leaf` is a sparse matrix or array of SciPy."""
    return type(leaf).__module__.startswith("scipy.sparse") and hasattr(leaf, "tocsr")


def draw_keras_order(seed: int, total: int, batch_size: int | None) -> np.ndarray:
    """Return the order in which `Model.fit` reads the rows of arrays in each epoch.

    The seed of a shuffle follows from TensorFlow's seed and the number of operations
    before it, here as in the data set that Keras makes of arrays. Each epoch starts
    from that seed, so all of them have the same order.

    Args:
        seed: TensorFlow's global seed.
        total: The number of rows.
        batch_size: Rows of a batch inside of which rows are shuffled
            (`shuffle="batch"`); `None` to shuffle all of them.

    >>> draw_keras_order(0, 8, None).tolist()
    [6, 4, 7, 3, 2, 1, 5, 0]
    """

    @tf.autograph.experimental.do_not_convert
    def shuffle(rows: tf.Tensor) -> tf.Tensor:
        tf.compat.v1.get_default_graph().seed = seed
        all_rows = tf.range(total, dtype=tf.int64) if batch_size is None else rows
        return tf.random.shuffle(all_rows)

    data = tf.data.Dataset.range(1 if batch_size is None else total)
    data = data.batch(batch_size or 1).map(shuffle)
    with tf.device("CPU:0"):
        return np.concatenate([order.numpy() for order in as_untuned(data)])


def lists_to_arrays(data: Any) -> Any:
    """Make an array of each list of numbers or strings, as KerasHub's models take them.

    A list of arrays stays a list: these are the inputs, or the outputs, of a model.

    >>> lists_to_arrays((["one row", "another"], None))
    (array(['one row', 'another'], dtype='<U7'), None)
    """
    if type(data) is tuple:
        return tuple(map(lists_to_arrays, data))
    if isinstance(data, dict):
        return {name: lists_to_arrays(piece) for name, piece in data.items()}
    if isinstance(data, list) and data:
        leaves = keras.tree.flatten(data)
        if all(isinstance(leaf, (str, bytes, int, float)) for leaf in leaves):
            return np.asarray(data)
    return data


def read_rows(
    arrays: Arrays,
    division: Division,
    epoch: tf.Variable,
    *,
    rank: int,
    shuffle: bool | str,
    seed: int,
    fixed: np.ndarray | None = None,
) -> tf.data.Dataset:
    """Read a rank's rows of every global batch of an epoch.

    Every rank, of any number of ranks, reads a pass in the same order. The number of
    the epoch is read from a variable, because an iterator cannot count epochs: Keras
    makes more iterators than there are epochs.

    Args:
        arrays: All rows; every rank holds them.
        division: Which part of which pass is read at which step.
        epoch: An int64 variable. An iterator reads the epoch whose number it holds when
            the iterator is made.
        rank: The rank.
        shuffle: `True`, `False`, or `"batch"` to shuffle inside global batches only.
        seed: Of the order, together with the number of the pass.
        fixed: The order of every pass (`draw_keras_order`); `None` for one of ours.

    Returns:
        A data set of batches with their `BatchRows`, one for each step. The last batch
        of each pass may be smaller: a rank that has no row of it reads its first one.
        The epoch in which a training is resumed has fewer batches.
    """

    def order_pass(number: int) -> np.ndarray:
        if fixed is not None:
            return fixed
        if not shuffle:
            return np.arange(division.total)
        seeds = [seed, division.first_pass + number]
        with tf.device("CPU:0"):
            rows = tf.range(division.total, dtype=tf.int64)
            rows = tf.random.experimental.stateless_shuffle(rows, seeds).numpy()
        if shuffle == "batch":
            begin = division.begin if number == 0 else 0
            batches = (rows - begin) // division.global_batch
            rows = rows[np.argsort(batches, kind="stable")]
        return rows

    def list_batches(current: Any, index: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of a pass in an epoch, and numbers of each batch in it.

        These are the place of its first row, its length, and its `BatchRows`.
        """
        current = max(int(current), division.epoch)
        first = division.find_first_step(current)
        steps = np.arange(first, first + division.count_steps(current))
        passes, begin, end = division.span(steps)
        number = passes[0] + index
        begin, end = begin[passes == number], end[passes == number]
        own, own_end = own_span(end - begin, rank, division.size)
        rows = own_end - own
        place = begin + own * (rows > 0)
        batches = np.stack([place, np.maximum(rows, 1), rows, own, end - begin], 1)
        return order_pass(int(number)) if len(batches) else steps[:0], batches

    @tf.autograph.experimental.do_not_convert
    def read_pass(index: tf.Tensor) -> tf.data.Dataset:
        given = [epoch.read_value(), index]
        order, batches = tf.numpy_function(list_batches, given, [tf.int64, tf.int64])
        order = tf.ensure_shape(order, [None])

        @tf.autograph.experimental.do_not_convert
        def take(batch: tf.Tensor) -> Any:
            indices = order[batch[0] : batch[0] + batch[1]]
            indices = tf.ensure_shape(indices, [division.known_items])
            return put_beside(indices, BatchRows(*tf.unstack(batch[2:])))

        batches = tf.ensure_shape(batches, [None, 5])
        return tf.data.Dataset.from_tensor_slices(batches).map(take)

    # The variable is read inside `flat_map`, when an iterator is made. An epoch may
    # begin and end in the middle of a pass.
    passes = -(-division.steps // division.steps_per_pass) + 1
    rows = tf.data.Dataset.range(passes).flat_map(read_pass)
    set_length = with_length if division.is_within_epoch else assert_length
    return set_length(arrays.read(rows), division.steps).prefetch(tf.data.AUTOTUNE)


def _make_leaf_reader(leaf: Any) -> Callable[[tf.Tensor], Any]:
    if is_scipy_sparse(leaf):
        return _make_sparse_reader(leaf)
    if not isinstance(leaf, np.memmap):
        with tf.device("CPU:0"):
            is_ragged = isinstance(leaf, tf.RaggedTensor)
            tensor = leaf if is_ragged else tf.convert_to_tensor(leaf)
            tensor = _cast_to_floatx(tensor)
        return lambda rows: tf.gather(tensor, rows)

    def from_disk(rows: tf.Tensor) -> tf.Tensor:
        values = tf.numpy_function(
            lambda indices: np.asarray(leaf[indices]), [rows], tf.as_dtype(leaf.dtype)
        )
        return _cast_to_floatx(
            tf.ensure_shape(values, [rows.shape[0], *leaf.shape[1:]])
        )

    return from_disk


def _make_sparse_reader(matrix: Any) -> Callable[[tf.Tensor], tf.SparseTensor]:
    """Make a function of row indices that returns these rows of a SciPy CSR matrix."""
    matrix = matrix if matrix.has_sorted_indices else matrix.sorted_indices()

    def entries(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = matrix[indices].tocoo()
        return np.stack([rows.row, rows.col], 1).astype("int64"), rows.data

    def read(rows: tf.Tensor) -> tf.SparseTensor:
        dtypes = [tf.int64, tf.as_dtype(matrix.dtype)]
        indices, values = tf.numpy_function(entries, [rows], dtypes)
        values = _cast_to_floatx(tf.ensure_shape(values, [None]))
        shape = tf.stack([tf.size(rows, tf.int64), matrix.shape[1]])
        return tf.SparseTensor(tf.ensure_shape(indices, [None, 2]), values, shape)

    return read


def _cast_to_floatx(tensor: tf.Tensor) -> tf.Tensor:
    """Convert floats to `floatx`, as Keras does with arrays."""
    if tensor.dtype.is_floating:
        return tf.cast(tensor, keras.config.floatx())
    return tensor
