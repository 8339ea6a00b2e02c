"""Shard a `keras.utils.PyDataset` by batch, round robin."""

import math
from typing import Any

import keras
import numpy as np

from keras_dist.data import leftover
from keras_dist.data.batches_known_length import rows_of_batches
from keras_dist.data.batches_schedule import BatchSchedule, batch_schedule_of
from keras_dist.data.batches_stream import (
    Stream,
    fingerprint_of,
    num_rows,
    standardized,
)
from keras_dist.data.feed import ShardSpec


class ShardedSequence(keras.utils.PyDataset):
    """This rank's batches of a `PyDataset`; the batches of other ranks are not made.

    In step i, rank r of N reads the batch of index i × N + r. If the number of batches
    is not a multiple of N, fewer than N batches are left for the last step: the tail.
    Its rows are sharded, and it is left out if it has too few rows.

    With `shuffle`, the order of the batches is a function of the seed and the epoch
    alone, so it is the same on every rank and for every number of ranks. The last batch
    stays the last one, because it may be smaller.

    Args:
        stream: The user's `PyDataset`, with the same batches on all ranks.
        spec: How data is divided among the ranks.
        is_training: Whether all ranks have to make the same number of steps.
        shuffle: Whether the order of the batches changes from epoch to epoch.
        rule: What becomes of the tail, as `leftover.rule_of` returns it.

    Attributes:
        is_marked: Whether each batch comes with a mark (`leftover.marked`).
        leftover: What the plan says of the tail.
    """

    def __init__(
        self,
        stream: Stream,
        spec: ShardSpec,
        is_training: bool,
        shuffle: bool,
        rule: str = "cut",
    ) -> None:
        data = stream.data
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self.data = data
        self._rank, self._size = spec.rank, spec.size
        self._rule, self._is_training = rule, is_training
        tail = int(data.num_batches or 0) % spec.size
        self.is_marked = (
            is_training
            and rule == "whole"
            and data.num_batches is not None
            and (tail > 0 or spec.position is not None)
        )
        self.leftover = leftover.in_words(rule, tail)
        self._shuffle, self._seed = shuffle, spec.seed
        self._skipped = 0
        hook = type(data).on_epoch_end
        is_static = hook is keras.utils.PyDataset.on_epoch_end or not is_training
        self._channel = None if is_static else spec.channel
        self._rows_needed = spec.size if is_training else spec.rank + 1
        self._rows: dict[int, int] = {}  # of the batches whose rows were counted
        self._order = self._order_of(spec.position.epoch if spec.position else 0)
        self._has_tail = self._finds_tail()
        self.schedule = self._schedule_of(spec) if is_training else None

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes make batches and take no part in collectives.
        return self.__dict__ | {"_channel": None}

    def assign(self, epoch: int) -> None:
        """Set the number of the epoch that is read from now on."""
        self._order = self._order_of(epoch)
        if self.schedule is not None:
            self._skipped = self.schedule.skipped_in(int(epoch))
        # Other batches are the last ones now, and may have fewer rows.
        self._has_tail = self._finds_tail()

    def batches_at(self, epoch: int, step: int) -> list[int]:
        """Indices of the user's batches that this rank reads at a step of an epoch."""
        order, total = self._order_of(epoch), self.data.num_batches
        begin = step * self._size
        begin += self.schedule.skipped_in(epoch) if self.schedule else 0
        if total is None or begin + self._size <= total:
            return [_index_in_order(order, begin + self._rank)]
        return [_index_in_order(order, index) for index in range(begin, total)]

    @property
    def length(self) -> float:
        """`num_batches` as a number: `math.inf` instead of `None`."""
        return math.inf if self.num_batches is None else self.num_batches

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in the current epoch; `None` for infinite data."""
        if self.data.num_batches is None:
            return None
        # Keras asks before `assign` was called, and again when it begins the epoch.
        left = int(self.data.num_batches) - self._skipped
        return left // self._size + self._has_tail

    def __getitem__(self, index: int) -> Any:
        begin = index * self._size + self._skipped
        total = self.data.num_batches
        if total is None or begin + self._size <= total:
            batch = self.data[self._batch_index(begin + self._rank)]
            if not self.is_marked:
                return batch
            return leftover.marked(standardized(batch), True)
        if self._rule == "whole":
            count = total - begin
            own = begin + leftover.own_index(self._rank, count)
            batch = self.data[self._batch_index(own)]
            if not self.is_marked:
                return batch
            return leftover.marked(standardized(batch), self._rank < count)
        tail = [self.data[self._batch_index(index)] for index in range(begin, total)]
        return rows_of_batches(tail, rank=self._rank, size=self._size)

    def on_epoch_begin(self) -> None:
        """Call the user's `on_epoch_begin`."""
        self.data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call the user's `on_epoch_end`; it may shuffle, but alike on all ranks.

        Raises:
            ValueError: On all ranks, if their first batches differ afterwards.
        """
        self.data.on_epoch_end()
        if type(self.data).on_epoch_end is not keras.utils.PyDataset.on_epoch_end:
            self._rows.clear()  # the user's batches may be others now
        if self._channel is None:
            return
        fingerprints = self._channel.gather(fingerprint_of([self.data[0]]))
        if len(set(fingerprints)) > 1:
            raise ValueError(
                "After `on_epoch_end` the ranks' batches differ, so they cannot be "
                f"sharded. Received: x of type {type(self.data).__name__}. Shuffle it "
                "with a random generator that has the same seed on every rank."
            )

    def _schedule_of(self, spec: ShardSpec) -> BatchSchedule | None:
        total = self.data.num_batches
        if total is None or not spec.keeps_position:
            return None

        def steps_after(skipped: int) -> int:
            self._skipped = skipped
            self._has_tail = self._finds_tail()
            return self.num_batches or 0

        sizes = {"length": int(total), "size": self._size}
        schedule = batch_schedule_of(spec.position, steps_after=steps_after, **sizes)
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

    def _finds_tail(self) -> bool:
        """Whether this rank has a batch of what is left over."""
        if self._rule in ("whole", "drop"):
            total = int(self.data.num_batches or 0) - self._skipped
            has_batch = total % self._size > (0 if self._is_training else self._rank)
            return has_batch and self._rule == "whole"
        return self._count_tail_rows() >= self._rows_needed

    def _count_tail_rows(self) -> int:
        total = self.data.num_batches
        if total is None:
            return 0
        tail = range(total - (total - self._skipped) % self._size, total)
        return sum(self._rows_of(self._batch_index(index)) for index in tail)

    def _rows_of(self, index: int) -> int:
        if index not in self._rows:
            self._rows[index] = num_rows(self.data[index])
        return self._rows[index]


def _index_in_order(order: Any, index: int) -> int:
    is_last = order is None or index >= len(order)
    return index if is_last else int(order[index])
