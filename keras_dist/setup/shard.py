"""`shard`: the user divides data among the ranks before it is decoded."""

import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, TypeVar, overload

import keras
import tensorflow as tf

from keras_dist import comm
from keras_dist.data.dealer import Dealer
from keras_dist.data.division import local_items
from keras_dist.data.pipeline import list_seeds
from keras_dist.data.presharded import divide_rows, presharded_of
from keras_dist.data.sequence import ShardedSequence
from keras_dist.data.source import DeclaredIterable

Item = TypeVar("Item")
Data: TypeAlias = tf.data.Dataset | keras.utils.PyDataset | Iterable[Any]


@overload
def shard(
    batch_size: int | None = None,
    *,
    batch: Literal["rank", "global"] = "rank",
) -> Callable[[tf.data.Dataset], tf.data.Dataset]: ...


@overload
def shard(
    batch_size: list[Item],
    *,
    batch: Literal["rank", "global"] = "rank",
) -> list[Item]: ...


@overload
def shard(
    batch_size: Data,
    *,
    batch: Literal["rank", "global"] = "rank",
) -> Any: ...


def shard(
    batch_size: int | Data | None = None,
    *,
    batch: Literal["rank", "global"] = "rank",
) -> Callable[[tf.data.Dataset], tf.data.Dataset] | Data:
    """Divide data among the ranks before its rows are decoded.

    Without it each rank decodes all rows, and then leaves out the batches of the other
    ranks. `dataset.apply(keras_dist.shard(batch_size))` before the first expensive
    `map` leaves this rank the rows that it is going to train on. After
    `.batch(batch_size)` all ranks together read the global batches of one process, the
    last one included. On one process nothing is changed.

    `dist_fit`, `evaluate` and `predict` know such data, and do not shard it once more.
    The order before `shard` must be the same on all ranks: a `shuffle` needs a `seed`.
    `filter`, `take`, `skip` and `repeat` belong before `shard`.

    Args:
        batch_size: Rows of one rank's batch, as in the `.batch` that follows; N ranks
            make steps with N × `batch_size` rows. Without it a training cannot be
            resumed in the middle of an epoch, unless the batches have a static shape.
            Or, as the only argument, the data: a `tf.data.Dataset`, a list, a
            `keras.utils.PyDataset`, or another iterable of the same elements on all
            ranks.
        batch: As in `dist_fit`. `"global"`: `batch_size` rows are the batch of all
            ranks together, and `.batch(keras_dist.local_batch_size(batch_size))`
            follows: of 96 rows on five ranks, the first has 20 and the others 19.

    Returns:
        A function for `tf.data.Dataset.apply`. If data was passed, this rank's part of
        it, as a data set, a list, a `PyDataset` or an iterable.

    Raises:
        ValueError: If an argument is unusable, the data was already divided, or its
            shuffle has no seed.
        TypeError: If the data is neither in rows nor in batches.

    Example:

    >>> rows = tf.data.Dataset.range(8).apply(shard(2))
    >>> [batch.tolist() for batch in rows.batch(2).as_numpy_iterator()]
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> shard(["a.jpg", "b.jpg"])
    ['a.jpg', 'b.jpg']
    """
    try:
        given: Any = batch_size
        rows = None if given is None else operator.index(given)
    except TypeError:
        rows = None  # it is the data
    if rows is not None and rows < 1:
        raise ValueError(
            "`batch_size`, the rows of one rank's batch, must be a whole number of at "
            f"least 1. Received: batch_size={batch_size!r}"
        )
    rank, size = comm.rank(), comm.size()
    if batch not in ("rank", "global"):
        raise ValueError(f'`batch` must be "rank" or "global". Received: {batch!r}')
    if batch == "global" and size > 1:
        if rows is None:
            raise ValueError(
                'With batch="global" `shard` divides the rows of each batch, and needs '
                f"their number. Received: batch_size={batch_size!r}. Apply "
                '`shard(batch_size, batch="global")` to a tf.data.Dataset of rows.'
            )
        _check_global_batch(rows, size)
        return lambda dataset: _divide_dataset(
            dataset, rows, rank, size, is_global=True
        )
    if rows is None and batch_size is not None:
        return _take_local_part(batch_size, rank, size)
    return lambda dataset: _divide_dataset(dataset, rows, rank, size)


def local_batch_size(batch_size: int) -> int:
    """Count this rank's rows of a batch that all ranks share.

    Use it behind `keras_dist.shard(batch_size, batch="global")`.

    Args:
        batch_size: Rows of all ranks together, at least one for each.

    Returns:
        `batch_size` / ranks, rounded up on the first ranks, and down on the others.

    Raises:
        ValueError: If there are fewer rows than ranks.

    Example:

    >>> local_batch_size(96)
    96
    """
    rank, size = comm.rank(), comm.size()
    _check_global_batch(batch_size, size)
    return len(range(batch_size)[local_items(rank, size)])


def _check_global_batch(rows: int, size: int) -> None:
    if rows < size:
        raise ValueError(
            "A batch that all ranks share needs a row for each rank. "
            f"Received: batch_size={rows} for {size} ranks. Pass a larger batch, or "
            f"start at most {rows} processes."
        )


def _take_local_part(data: Any, rank: int, size: int) -> Any:
    """Return one rank's part of any data."""
    if isinstance(data, tf.data.Dataset):
        return _divide_dataset(data, None, rank, size)
    is_sequence = isinstance(data, keras.utils.PyDataset)
    is_array = hasattr(data, "shape") or isinstance(data, (str, bytes, dict))
    if is_array or not (is_sequence or isinstance(data, Iterable)):
        raise TypeError(
            "`shard` takes a tf.data.Dataset, a keras.utils.PyDataset, a list or "
            f"another iterable. Received: data of type {type(data).__name__}. Arrays "
            "are sharded by `dist_fit`."
        )
    if size == 1:
        return data
    if is_sequence:
        return ShardedSequence(data, Dealer(rank, size, is_training=False))
    if isinstance(data, (list, tuple)):
        return data[local_items(rank, size)]
    return DeclaredIterable(data, rank=rank, size=size)


def _divide_dataset(
    dataset: tf.data.Dataset,
    batch_size: int | None,
    rank: int,
    size: int,
    *,
    is_global: bool = False,
) -> tf.data.Dataset:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "What `shard(…)` returns is for `tf.data.Dataset.apply`. "
            f"Received: data of type {type(dataset).__name__}"
        )
    if presharded_of(dataset) is not None:
        raise ValueError(
            "The data was already divided by `keras_dist.shard`. "
            f"Received: a {type(dataset).__name__}. Apply it once."
        )
    if size == 1:
        return dataset
    if (0, 0) in list_seeds(dataset):
        raise ValueError(
            "The data is shuffled without a seed before `shard`: each rank would take "
            f"its part of another order. Received: a {type(dataset).__name__}. Pass "
            "`seed` to `shuffle` (and to `list_files`), or call "
            "keras.utils.set_random_seed with the same number on every rank before."
        )
    return divide_rows(
        dataset, batch_size=batch_size, rank=rank, size=size, is_global=is_global
    )
