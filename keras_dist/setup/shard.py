"""`shard`: the user divides a data set among the ranks before it is decoded."""

from collections.abc import Callable
from typing import Literal

import tensorflow as tf

from keras_dist import comm
from keras_dist.data.division import divide_batch
from keras_dist.data.pipeline import list_seeds
from keras_dist.data.presharded import Presharded, divide_rows, find_presharded
from keras_dist.errors import check_choice, check_count


def shard(
    batch_size: int | None = None,
    *,
    batch: Literal["rank", "global"] = "rank",
) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Divide the rows of a data set among the ranks before they are decoded.

    Without it, each rank decodes all rows, and then drops the batches of the other
    ranks. `dataset.apply(keras_dist.shard(batch_size))` before the first expensive
    `map` keeps only the rows that this rank trains on. After `.batch(batch_size)`, all
    ranks together read the same global batches as one process, including the last one.
    On one process, nothing changes.

    `dist_fit`, `evaluate` and `predict` recognize such data, and do not shard it again.
    The order before `shard` must be the same on all ranks: a `shuffle` needs a `seed`.
    Call `filter`, `take`, `skip` and `repeat` before `shard`.

    Args:
        batch_size: Rows in the batch of one rank, as in the `.batch` that follows. A
            step of N ranks then has N × `batch_size` rows.
        batch: As in `dist_fit`. With `"global"`, `batch_size` is the batch of all ranks
            together; then call `.batch(keras_dist.local_batch_size(batch_size))`.

    Returns:
        A function for `tf.data.Dataset.apply`.

    Raises:
        TypeError: If it is applied to something other than a data set.
        ValueError: If an argument is invalid, the data was already divided, or its
            shuffle has no seed.

    Example:

    >>> rows = tf.data.Dataset.range(8).apply(shard(2))
    >>> [batch.tolist() for batch in rows.batch(2).as_numpy_iterator()]
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    rows = None if batch_size is None else check_count("batch_size", batch_size)
    check_choice("batch", batch, ("rank", "global"))
    if batch == "global" and comm.size() > 1:
        if rows is None:
            raise ValueError(
                'With batch="global" `shard` needs the number of rows of a batch. '
                f"Received: batch_size={batch_size!r}. Apply "
                '`shard(batch_size, batch="global")` to a tf.data.Dataset of rows.'
            )
        rows = local_batch_size(rows)
    return lambda dataset: _divide(dataset, rows, batch)


def local_batch_size(batch_size: int) -> int:
    """Return the number of this rank's rows in a batch that all ranks share.

    Use it after `keras_dist.shard(batch_size, batch="global")`.

    Args:
        batch_size: Rows of all ranks together.

    Returns:
        `batch_size` / ranks.

    Raises:
        ValueError: If `batch_size` is not a multiple of the number of ranks.

    Example:

    >>> local_batch_size(96)
    96
    """
    return divide_batch(batch_size, comm.size(), "`shard`")


def _divide(
    dataset: tf.data.Dataset, batch_size: int | None, batch: str
) -> tf.data.Dataset:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "What `shard(…)` returns is for `tf.data.Dataset.apply`. "
            f"Received: data of type {type(dataset).__name__}"
        )
    if find_presharded(dataset) is not None:
        raise ValueError(
            "The data was already divided by `keras_dist.shard`. "
            f"Received: a {type(dataset).__name__}. Apply it once."
        )
    if comm.size() == 1:
        return dataset
    if (0, 0) in list_seeds(dataset):
        raise ValueError(
            "The data is shuffled without a seed before `shard`: each rank would take "
            f"its part of another order. Received: a {type(dataset).__name__}. Pass "
            "`seed` to `shuffle` (and to `list_files`), or call "
            "keras.utils.set_random_seed with the same number on every rank before."
        )
    presharded = Presharded(batch_size, dataset, batch)
    return divide_rows(presharded, comm.rank(), comm.size())
