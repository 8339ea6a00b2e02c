"""Deal arrays to the ranks row by row."""

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.sharding.arrays_order import Order
from keras_dist.sharding.arrays_reader import reader_of
from keras_dist.sharding.arrays_rows import shard_rows
from keras_dist.sharding.batches_known_length import of_length, unsharded

_UNEVEN = (tf.RaggedTensor, tf.SparseTensor)


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

    def pieces(self) -> tuple[Any, ...]:
        """`(x,)`, `(x, y)` or `(x, y, sample_weight)`, as a data set yields them."""
        if self.sample_weight is not None:
            weight = self.sample_weight
            if keras.tree.is_nested(self.y) and not keras.tree.is_nested(weight):
                # One weight a row for all outputs, as Keras does for arrays.
                weight = keras.tree.map_structure(lambda _: weight, self.y)
            return (self.x, self.y, weight)
        return (self.x,) if self.y is None else (self.x, self.y)

    def __getitem__(self, rows: slice) -> "Arrays":
        """The arrays of some rows only; NumPy arrays are views and not copied."""

        def cut(leaf: Any) -> Any:
            return None if leaf is None else leaf[rows]

        return Arrays(
            *(
                keras.tree.map_structure(cut, part)
                for part in (self.x, self.y, self.sample_weight)
            )
        )

    @property
    def is_on_disk(self) -> bool:
        """Whether some of them are memory-mapped files."""
        return any(isinstance(leaf, np.memmap) for leaf in self._leaves())

    def _leaves(self) -> list[Any]:
        everything = keras.tree.flatten((self.x, self.y, self.sample_weight))
        return [leaf for leaf in everything if leaf is not None]


def is_arrays(data: Any) -> bool:
    """Whether `data` is an array-like, or a structure of nothing else."""
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
    """Whether `data` holds a tensor whose rows cannot be told apart by place."""
    return any(isinstance(leaf, _UNEVEN) for leaf in keras.tree.flatten(data))


def as_arrays(x: Any, y: Any = None, sample_weight: Any = None) -> Arrays:
    """`Arrays` of pandas, NumPy and TensorFlow values; pandas becomes NumPy."""

    def plain(leaf: Any) -> Any:
        is_plain_already = (
            leaf is None or tf.is_tensor(leaf) or isinstance(leaf, np.memmap)
        )
        return leaf if is_plain_already else np.asarray(leaf)

    return Arrays(
        *(keras.tree.map_structure(plain, part) for part in (x, y, sample_weight))
    )


def split_validation(arrays: Arrays, fraction: float) -> tuple[Arrays, Arrays]:
    """Training and validation rows, the last `fraction` for validation, as in Keras.

    It is cut before anything is dealt, so that no row is in both on any rank.

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
    """This rank's rows for an evaluation; where it has none, the first row.

    Keras cannot evaluate nothing: a rank without a row evaluates one that belongs to
    another rank, and its metrics must not be counted.
    """
    if rank >= arrays.num_rows:
        return arrays[slice(0, 1)]
    return arrays[shard_rows(arrays.num_rows, rank=rank, size=size)]


def in_batches(arrays: Arrays, batch_size: int) -> tf.data.Dataset:
    """All rows in order, read batch by batch: for arrays larger than memory."""
    read = reader_of(arrays.pieces())
    rows = tf.data.Dataset.range(arrays.num_rows).batch(batch_size)
    return unsharded(rows.map(read, tf.data.AUTOTUNE, deterministic=True))


def find_rows(arrays: Arrays, batch: Any) -> np.ndarray:
    """Where the rows of a batch stand in arrays that Keras has shuffled by itself.

    Args:
        arrays: That were read.
        batch: `(x, …)` as it was read, with NumPy arrays.

    Returns:
        The number of the first row that is equal to each; -1 where none is.

    >>> find_rows(Arrays(np.array([1.0, 3.0, 2.0])), (np.array([2.0, 1.0]),)).tolist()
    [2, 0]
    """
    given = [leaf for leaf in keras.tree.flatten(arrays.pieces()) if leaf is not None]
    read = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    # Keras may have added weights of classes.
    read = [np.asarray(leaf) for leaf, _ in zip(read, given, strict=False)]
    found: dict[bytes, int] = dict.fromkeys(_keys(read), -1)
    for begin in range(0, arrays.num_rows, 4096):
        if -1 not in found.values():
            break
        piece = [
            np.asarray(leaf[begin : begin + 4096])
            .astype(own.dtype)
            .reshape(-1, *own.shape[1:])
            for leaf, own in zip(given, read, strict=False)
        ]
        for pass_index, key in enumerate(_keys(piece)):
            if found.get(key) == -1:
                found[key] = begin + pass_index
    return np.array([found[key] for key in _keys(read)], np.int64)


def _keys(leaves: list[np.ndarray]) -> list[bytes]:
    """All bytes of each row."""
    return [
        b"".join(leaf[row].tobytes() for leaf in leaves)
        for row in range(len(leaves[0]))
    ]


def shard_training(
    arrays: Arrays, order: Order, *, epoch: tf.Variable
) -> tf.data.Dataset:
    """This rank's part of every global batch of an epoch.

    Which epoch is read stands in a variable, because Keras makes more iterators than
    there are epochs, and one that counted them would be wrong.

    Args:
        arrays: All rows; every rank holds them.
        order: In which they are dealt.
        epoch: Number of the epoch that an iterator made from now on reads, int64.

    Returns:
        A data set of as many batches `(x, …)` of shape `(batch_size, …)` as an epoch
        has steps, though its first pass may be shorter; the last batch of a pass of the
        rows may be smaller.
    """
    schedule = order.schedule
    in_a_pass, in_first = schedule.in_a_pass, schedule.in_first_pass
    read = reader_of(arrays.pieces())

    def batches(pass_index: tf.Tensor, begin: tf.Tensor, steps: tf.Tensor) -> Any:
        is_first, rows = tf.equal(pass_index, 0), order.of_pass(pass_index)
        first = begin - tf.where(
            is_first, pass_index, in_first + (pass_index - 1) * in_a_pass
        )
        in_this = tf.where(is_first, in_first + pass_index, in_a_pass)
        return tf.data.Dataset.range(
            tf.maximum(first, 0), tf.minimum(first + steps, in_this)
        ).map(lambda step: order.of_batch(rows, pass_index, step))

    def pass_of(step: tf.Tensor) -> tf.Tensor:
        return tf.where(step < in_first, 0 * step, 1 + (step - in_first) // in_a_pass)

    def passes(_: tf.Tensor) -> tf.data.Dataset:
        begin = schedule.begin(epoch.read_value())
        steps = schedule.steps_of_epoch(epoch.read_value())
        pass_indices = tf.data.Dataset.range(
            pass_of(begin), pass_of(begin + steps - 1) + 1
        )
        return pass_indices.flat_map(
            lambda pass_index: batches(pass_index, begin, steps)
        )

    rows_of_batches = tf.data.Dataset.range(1).flat_map(passes)
    dataset = rows_of_batches.map(read, tf.data.AUTOTUNE, deterministic=True)
    return unsharded(of_length(dataset, schedule.steps, schedule.is_within_epoch))
