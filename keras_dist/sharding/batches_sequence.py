"""One rank's batches of a `keras.utils.PyDataset`."""

import math
from typing import Any

import keras
import numpy as np

from keras_dist.sharding.batches_known_length import rows_of_batches
from keras_dist.sharding.batches_schedule import BatchSchedule, batch_schedule_of
from keras_dist.sharding.batches_stream import Stream, fingerprint_of, num_rows
from keras_dist.sharding.feed import Split


class ShardedSequence(keras.utils.PyDataset):
    """Batches dealt by their index; only this rank's are ever made.

    The batches that are left over after the last full round are dealt row by row, where
    they have a row for each rank. With `shuffle`, all batches but the last are in an
    order that follows from the seed and the epoch: the same on every rank, whatever
    their number. The last stays, since it may be smaller.

    Args:
        stream: The user's own, the same on all ranks.
        split: How data is divided.
        is_training: Whether all ranks have to make the same number of steps.
        shuffle: Whether the order of the batches changes from epoch to epoch.
    """

    def __init__(
        self, stream: Stream, split: Split, is_training: bool, shuffle: bool
    ) -> None:
        data = stream.data
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self.data = data
        self._rank, self._size = split.rank, split.size
        self._shuffle, self._seed = shuffle, split.seed
        self._skipped = 0
        own = type(data).on_epoch_end
        is_static = own is keras.utils.PyDataset.on_epoch_end or not is_training
        self._channel = None if is_static else split.channel
        self._needed = split.size if is_training else split.rank + 1
        self._has_tail = self._count_rows_left() >= self._needed
        self.schedule = self._schedule_of(split) if is_training else None
        self._order = self._order_of(0)

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes make batches, and talk to no rank.
        return self.__dict__ | {"_talk": None}

    def assign(self, epoch: int) -> None:
        """Say which epoch is read from now on."""
        self._order = self._order_of(epoch)
        if self.schedule is not None:
            self._skipped = self.schedule.skipped_in(int(epoch))
            self._has_tail = self._count_rows_left() >= self._needed

    def batches_at(self, epoch: int, step: int) -> list[int]:
        """Of the user's batches, those that this rank reads at a step of an epoch."""
        order, total = self._order_of(epoch), self.data.num_batches
        begin = step * self._size
        begin += self.schedule.skipped_in(epoch) if self.schedule else 0
        if total is None or begin + self._size <= total:
            return [_index_in_order(order, begin + self._rank)]
        return [_index_in_order(order, index) for index in range(begin, total)]

    @property
    def length(self) -> float:
        """The same, as a number."""
        return math.inf if self.num_batches is None else self.num_batches

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in a pass; `None` where there is no end."""
        if self.data.num_batches is None:
            return None
        # Keras asks before it says which epoch it reads, and then when it begins to.
        left = int(self.data.num_batches) - self._skipped
        return left // self._size + self._has_tail

    def __getitem__(self, index: int) -> Any:
        begin = index * self._size + self._skipped
        total = self.data.num_batches
        if total is None or begin + self._size <= total:
            return self.data[self._batch_index(begin + self._rank)]
        left = [self.data[self._batch_index(index)] for index in range(begin, total)]
        return rows_of_batches(left, rank=self._rank, size=self._size)

    def on_epoch_begin(self) -> None:
        """The user's own."""
        self.data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """The user's own, and then a look whether the ranks still read the same.

        Raises:
            ValueError: On all ranks, if they do not.
        """
        self.data.on_epoch_end()
        if self._channel is None:
            return
        everyone = self._channel.gather(fingerprint_of([self.data[0]]))
        if len(set(everyone)) > 1:
            raise ValueError(
                "After `on_epoch_end` the ranks' batches differ, so that no batch can "
                f"be dealt. Received: x of type {type(self.data).__name__}. Shuffle it "
                "by a random generator with the same seed on every rank."
            )

    def _schedule_of(self, split: Split) -> BatchSchedule | None:
        total = self.data.num_batches
        if total is None or not split.keeps_position:
            return None

        def steps_after(skipped: int) -> int:
            self._skipped = skipped
            self._has_tail = self._count_rows_left() >= self._needed
            return self.num_batches or 0

        sizes = {"length": int(total), "size": self._size}
        schedule = batch_schedule_of(split.position, steps_after=steps_after, **sizes)
        steps_after(0)
        return schedule

    def _batch_index(self, index: int) -> int:
        return _index_in_order(self._order, index)

    def _order_of(self, epoch: int) -> Any:
        total = self.data.num_batches
        if not (self._shuffle and total):
            return None
        generator = np.random.default_rng([self._seed, int(epoch)])
        return generator.permutation(total - 1)

    def _count_rows_left(self) -> int:
        total = self.data.num_batches
        if total is None:
            return 0
        left = range(total - (total - self._skipped) % self._size, total)
        return sum(num_rows(self.data[index]) for index in left)


def _index_in_order(order: Any, index: int) -> int:
    is_last = order is None or index >= len(order)
    return index if is_last else int(order[index])
