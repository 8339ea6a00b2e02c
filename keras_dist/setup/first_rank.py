"""`shard="first"`: the first rank reads batches, and sends them to all others."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.data import draws
from keras_dist.data.arrays import UNEVEN
from keras_dist.errors import RankError, describe


class FirstRankBatches:
    """The first rank's batches, which all ranks get: each iterator is a pass.

    Args:
        data: Batches; on other ranks they are not read.
        shuffle: Whether a `PyDataset` is read in another order in each pass.
    """

    def __init__(self, data: Any, *, shuffle: bool) -> None:
        self._data, self._shuffle = data, shuffle

    def __iter__(self) -> Iterator[Any]:
        return receive(_read_pass(self._data, self._shuffle))


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


def receive(batches: Iterator[Any]) -> Iterator[Any]:
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
        kind, value = comm.gather_in_thread(message)[0]
        if kind == "end":
            return
        if kind == "error":
            raise error or RankError(0, value)
        yield value


def _to_arrays(batch: Any) -> Any:
    leaves = keras.tree.flatten(batch)
    if any(isinstance(leaf, UNEVEN) for leaf in leaves):
        raise ValueError(
            'With shard="first" batches of arrays are sent. Received: '
            f"{[type(leaf).__name__ for leaf in leaves]}"
        )
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else np.asarray(leaf), batch
    )
