"""Sequences and iterables that the user declares to be the same on all ranks."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.data.batches_sequence import ShardedSequence
from keras_dist.data.batches_stream import Stream
from keras_dist.data.division import division_of
from keras_dist.data.feed import ShardSpec


class DeclaredSequence(keras.utils.PyDataset):
    """One rank's batches of a `PyDataset`; `dist_fit` reads `data` itself.

    Args:
        data: A `PyDataset` with the same batches on all ranks.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, data: Any, *, rank: int, size: int) -> None:
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self.data = data
        self._spec = ShardSpec(rank, size)
        self._own: ShardedSequence | None = None

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank; `None` for infinite data."""
        return self._sharded().num_batches

    def __getitem__(self, index: int) -> Any:
        return self._sharded()[index]

    def on_epoch_begin(self) -> None:
        """Call the user's `on_epoch_begin`."""
        self.data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call the user's `on_epoch_end`."""
        self.data.on_epoch_end()

    def _sharded(self) -> ShardedSequence:
        # Not before it is asked for: batches that are left over are made to be counted.
        if self._own is None:
            stream = Stream(self.data)
            self._own = ShardedSequence(stream, self._spec, False, False)
        return self._own


class DeclaredIterable:
    """Every `size`-th element of an iterable; `dist_fit` reads `data` itself.

    Args:
        data: An iterable with the same elements on all ranks.
        rank: This rank.
        size: Number of ranks.

    >>> list(DeclaredIterable("abcde", rank=1, size=2))
    ['b', 'd']
    """

    def __init__(self, data: Iterable[Any], *, rank: int, size: int) -> None:
        self.data = data
        self._rank, self._size = rank, size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.data, self._rank, None, self._size)

    def __len__(self) -> int:
        return len(range(self._rank, len(self.data), self._size))  # type: ignore[arg-type]


def stream_of(data: Any) -> Stream:
    """A stream of the user's data, and what `keras_dist.shard` has said of it.

    Raises:
        ValueError: If a data set was made of several that were not divided alike.
    """
    if isinstance(data, (DeclaredSequence, DeclaredIterable)):
        return Stream(data.data, is_declared=True)
    is_dataset = isinstance(data, tf.data.Dataset)
    return Stream(data, division_of(data) if is_dataset else None)
