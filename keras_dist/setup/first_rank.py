"""`shard="first"`: the first rank reads batches, and sends them to all others."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.data import draws
from keras_dist.data.arrays import is_arrays
from keras_dist.errors import RankError, describe


def read_on_first_rank(data: Any, *, shuffle: bool = False) -> Any:
    """Return the batches of the first rank's data, the same on every rank.

    Args:
        data: Batches; on other ranks they are not read.
        shuffle: Whether a `PyDataset` is read in another order in each pass.

    Returns:
        An iterator if `data` is one, so that nobody begins it anew; else an iterable,
        of which each iterator is a pass.
    """
    if isinstance(data, Iterator):
        return _receive(data)
    return FirstRankBatches(lambda: _read_pass(data, shuffle))


class FirstRankBatches:
    """Each iterator is a pass of the first rank, whose batches all ranks get."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return _receive(self._begin())


def _read_pass(data: Any, shuffle: bool) -> Iterator[Any]:
    if not isinstance(data, keras.utils.PyDataset):
        yield from data
        return
    total = data.num_batches
    order: Any = itertools.count()
    if total is not None:
        order = list(range(total))
        if shuffle:
            random.shuffle(order)
    data.on_epoch_begin()
    for index in order:
        yield data[index]
    data.on_epoch_end()


def _receive(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of the first rank. Each of them is a collective."""
    while True:
        error, message = None, None
        if comm.rank() == 0:
            draws.draw_own(0)  # the other ranks draw nothing for it
            try:
                found = [_to_arrays(batch) for batch in itertools.islice(batches, 1)]
                message = ("batch", found[0]) if found else ("end", None)
            except Exception as caught:  # the other ranks wait
                error, message = caught, ("error", describe(caught))
            finally:
                draws.draw_alike()
        kind, value = comm.broadcast_in_thread(message)
        if kind == "end":
            return
        if kind == "error":
            raise error or RankError(0, value)
        yield value


def _to_arrays(batch: Any) -> Any:
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    if not is_arrays(tuple(map(np.asarray, leaves))) or any(
        isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves
    ):
        raise ValueError(
            'With shard="first" batches of arrays are sent. Received: '
            f"{[type(leaf).__name__ for leaf in leaves]}"
        )
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else np.asarray(leaf), batch
    )
