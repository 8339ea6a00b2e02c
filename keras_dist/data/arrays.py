"""Shard arrays by row."""

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.arrays_order import Order
from keras_dist.data.arrays_reader import reader_of
from keras_dist.data.arrays_rows import shard_rows
from keras_dist.data.batches_known_length import with_length, without_auto_shard

_UNEVEN = (tf.RaggedTensor, tf.SparseTensor)

# Rows that `find_rows` compares at a time.
_BLOCK = 4096


@dataclass(frozen=True)
class Arrays:
    """Inputs, targets and sample weights of the same rows, as Keras takes them.

    Args:
        x: Array-like of shape `(rows, …)`, or a list, tuple or dict of them.
        y: The same for the targets, or `None`.
        sample_weight: The same for the weights, or `None`.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None

    def __post_init__(self) -> None:
        lengths = {len(leaf) for leaf in self._leaves()}
        if len(lengths) != 1:
            shapes = [tuple(np.shape(leaf)) for leaf in self._leaves()]
            raise ValueError(
                "All arrays must have the same number of rows. "
                f"Received: arrays of the shapes {shapes}"
            )

    @property
    def num_rows(self) -> int:
        """Length of the first axis."""
        return len(self._leaves()[0])

    def row_shapes(self) -> list[tuple[int, ...]]:
        """Shape of one row of each array."""
        return [tuple(np.shape(leaf))[1:] for leaf in self._leaves()]

    def packed(self) -> Any:
        """What a step is given: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Without `y` it is as in Keras: `x` itself, or `(x,)` if that is a list or tuple;
        weights are dropped.
        """
        weight = self.sample_weight
        is_one = weight is not None and not keras.tree.is_nested(weight)
        if is_one and keras.tree.is_nested(self.y):
            # Keras applies a single array of weights to all outputs.
            weight = keras.tree.map_structure(lambda _: self.sample_weight, self.y)
        return keras.utils.pack_x_y_sample_weight(self.x, self.y, weight)

    def __getitem__(self, rows: slice) -> "Arrays":
        """A slice of the rows; NumPy arrays become views and are not copied."""

        def sliced(leaf: Any) -> Any:
            return None if leaf is None else leaf[rows]

        return Arrays(
            *(
                keras.tree.map_structure(sliced, array)
                for array in (self.x, self.y, self.sample_weight)
            )
        )

    @property
    def is_on_disk(self) -> bool:
        """Whether at least one array is a memory-mapped file."""
        return any(isinstance(leaf, np.memmap) for leaf in self._leaves())

    def _leaves(self) -> list[Any]:
        leaves = keras.tree.flatten((self.x, self.y, self.sample_weight))
        return [leaf for leaf in leaves if leaf is not None]


def is_arrays(data: Any) -> bool:
    """Whether `data` is an array-like, or a structure that holds only array-likes."""
    if data is None or isinstance(data, tf.data.Dataset):
        return False
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return bool(leaves) and all(
        hasattr(leaf, "shape")
        and (tf.is_tensor(leaf) or hasattr(leaf, "__array__"))
        and not isinstance(leaf, _UNEVEN)
        for leaf in leaves
    )


def is_ragged_or_sparse(data: Any) -> bool:
    """Whether `data` holds a ragged or sparse tensor, which cannot be sliced by row."""
    return any(isinstance(leaf, _UNEVEN) for leaf in keras.tree.flatten(data))


def as_arrays(x: Any, y: Any = None, sample_weight: Any = None) -> Arrays:
    """`Arrays` of pandas, NumPy and TensorFlow values; pandas becomes NumPy."""

    def converted(leaf: Any) -> Any:
        is_usable = leaf is None or tf.is_tensor(leaf) or isinstance(leaf, np.memmap)
        return leaf if is_usable else np.asarray(leaf)

    return Arrays(
        *(keras.tree.map_structure(converted, array) for array in (x, y, sample_weight))
    )


def weights_of_rows(y: Any, class_weight: dict[int, float]) -> np.ndarray:
    """The weight of each row's class, as Keras computes it for arrays.

    For a data set, Keras takes only weights for all classes, and makes them float32. So
    arrays that become one are given weights by row.

    Args:
        y: Classes of shape `(rows,)` or `(rows, 1)`, or one-hot `(rows, classes)`.
        class_weight: Weights of classes; that of another class is 1.

    Returns:
        An array of Keras's float type, of shape `(rows,)`.
    """
    classes = np.asarray(y)
    if classes.ndim > 1 and classes.shape[-1] != 1:
        classes = classes.argmax(axis=-1)
    classes = np.round(classes.reshape(len(classes))).astype("int32")
    weights = [class_weight.get(int(found), 1.0) for found in classes]
    return np.asarray(weights, dtype=keras.config.floatx())


def split_validation(arrays: Arrays, fraction: float) -> tuple[Arrays, Arrays]:
    """Training and validation rows; as in Keras, the last `fraction` is validation.

    The arrays must be split before they are sharded: then no row is training data on
    one rank and validation data on another.

    Raises:
        ValueError: If one of the two parts would be empty.
    """
    split_at = int(arrays.num_rows * (1.0 - fraction))
    if not 0 < split_at < arrays.num_rows:
        raise ValueError(
            "Both parts of a validation split need at least one row. Received: "
            f"validation_split={fraction} of {arrays.num_rows} rows. Pass more data, "
            "or another fraction."
        )
    return arrays[slice(0, split_at)], arrays[slice(split_at, None)]


def shard_validation(arrays: Arrays, *, rank: int, size: int) -> Arrays:
    """The rows that this rank evaluates or predicts, always at least one.

    Keras cannot evaluate empty data. If there are fewer rows than ranks, a rank without
    a row evaluates a copy of row 0, and its metrics must not be counted.
    """
    if rank >= arrays.num_rows:
        return arrays[slice(0, 1)]
    return arrays[shard_rows(arrays.num_rows, rank=rank, size=size)]


def in_batches(arrays: Arrays, batch_size: int) -> tf.data.Dataset:
    """All rows in order, read batch by batch: for arrays larger than memory."""
    read = reader_of(arrays.packed())
    rows = tf.data.Dataset.range(arrays.num_rows).batch(batch_size)
    return without_auto_shard(rows.map(read, tf.data.AUTOTUNE, deterministic=True))


def find_rows(arrays: Arrays, batch: Any) -> np.ndarray:
    """Find the rows of a batch in arrays that Keras has shuffled in an unknown order.

    Args:
        arrays: The arrays that the batch was read from.
        batch: `x` or `(x, …)` as it was read, with NumPy arrays.

    Returns:
        For each row of the batch the index of the first equal row of `arrays`, or -1 if
        there is none.

    >>> find_rows(Arrays(np.array([1.0, 3.0, 2.0])), (np.array([2.0, 1.0]),)).tolist()
    [2, 0]
    """
    leaves = keras.tree.flatten(arrays.packed())
    leaves = [leaf for leaf in leaves if leaf is not None]
    read = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    # A batch may have one array more: the weights that Keras made of class weights.
    read = [np.asarray(leaf) for leaf, _ in zip(read, leaves, strict=False)]
    row_of_key: dict[bytes, int] = dict.fromkeys(_row_keys(read), -1)
    for begin in range(0, arrays.num_rows, _BLOCK):
        if -1 not in row_of_key.values():
            break
        block = [
            np.asarray(leaf[begin : begin + _BLOCK])
            .astype(own.dtype)
            .reshape(-1, *own.shape[1:])
            for leaf, own in zip(leaves, read, strict=False)
        ]
        for offset, key in enumerate(_row_keys(block)):
            if row_of_key.get(key) == -1:
                row_of_key[key] = begin + offset
    return np.array([row_of_key[key] for key in _row_keys(read)], np.int64)


def _row_keys(leaves: list[np.ndarray]) -> list[bytes]:
    """The bytes of each row, over all arrays: equal for equal rows."""
    return [
        b"".join(leaf[row].tobytes() for leaf in leaves)
        for row in range(len(leaves[0]))
    ]


def shard_training(
    arrays: Arrays, order: Order, *, epoch: tf.Variable
) -> tf.data.Dataset:
    """This rank's rows of every global batch of an epoch.

    The number of the epoch is read from a variable, because an iterator cannot count
    epochs: Keras makes more iterators than there are epochs.

    Args:
        arrays: All rows; every rank holds them.
        order: The order in which the rows are read.
        epoch: An int64 variable. An iterator reads the epoch whose number it holds when
            the iterator is made.

    Returns:
        A data set of batches, `x` or `(x, …)`, of shape `(batch_size, …)`, one for
        each step of the epoch. The last batch of each pass over the rows may be
        smaller. The epoch in which a training is resumed has fewer batches.
    """
    schedule = order.schedule
    per_pass, in_first = schedule.steps_per_pass, schedule.steps_in_first_pass
    read = reader_of(arrays.packed())

    def pass_of_step(step: tf.Tensor) -> tf.Tensor:
        return tf.where(step < in_first, 0 * step, 1 + (step - in_first) // per_pass)

    def batches_of_pass(
        pass_index: tf.Tensor, begin: tf.Tensor, steps: tf.Tensor
    ) -> tf.data.Dataset:
        is_first, rows = tf.equal(pass_index, 0), order.rows_of_pass(pass_index)
        steps_before = tf.where(
            is_first, pass_index, in_first + (pass_index - 1) * per_pass
        )
        first = begin - steps_before
        end = tf.where(is_first, in_first + pass_index, per_pass)
        return tf.data.Dataset.range(
            tf.maximum(first, 0), tf.minimum(first + steps, end)
        ).map(lambda step: order.rows_of_batch(rows, pass_index, step))

    @tf.autograph.experimental.do_not_convert
    def passes_of_epoch(_: tf.Tensor) -> tf.data.Dataset:
        begin = schedule.steps_before_epoch(epoch.read_value())
        steps = schedule.steps_of_epoch(epoch.read_value())
        pass_indices = tf.data.Dataset.range(
            pass_of_step(begin), pass_of_step(begin + steps - 1) + 1
        )
        return pass_indices.flat_map(
            lambda pass_index: batches_of_pass(pass_index, begin, steps)
        )

    # The variable is read inside `flat_map`, when an iterator is made.
    rows_of_batches = tf.data.Dataset.range(1).flat_map(passes_of_epoch)
    dataset = rows_of_batches.map(read, tf.data.AUTOTUNE, deterministic=True)
    dataset = with_length(
        dataset, schedule.steps, may_be_shorter=schedule.is_within_epoch
    )
    return without_auto_shard(dataset)
