"""A `keras.utils.PyDataset`, sharded by batch, round robin."""

from typing import Any

import keras
import numpy as np

from keras_dist.data.division import (
    Channel,
    DataPosition,
    Division,
    batches_of_step,
)
from keras_dist.data.round_robin import Tail, marked, num_rows
from keras_dist.data.source import Declared, fingerprint_of, standardized


class ShardedSequence(Declared, keras.utils.PyDataset):
    """This rank's batches of a `PyDataset`; no batch of another rank is made.

    In step i, rank r of N reads the batch of index i × N + r, and `tail` decides about
    the last batches; or each rank makes every batch, and keeps its rows of it.

    With `seed`, the order of the batches is a function of the seed and the epoch alone,
    so it is the same on every rank and for every number of ranks. The last batch stays
    the last one, because it may be smaller.

    Args:
        data: The user's `PyDataset`, with the same batches on all ranks.
        tail: What this rank makes of the batches that are left over, or of each batch.
        seed: Seed of the order, which changes from epoch to epoch; `None` to keep it.
        channel: Collectives, to compare batches that the user's `on_epoch_end` changes.
        position: Where to resume, if a training is resumed.
        keeps_position: Whether to make a `division`, if there is an end.
    """

    def __init__(
        self,
        data: Any,
        tail: Tail,
        *,
        seed: int | None = None,
        channel: Channel | None = None,
        position: DataPosition | None = None,
        keeps_position: bool = False,
    ) -> None:
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self.data = data
        self._tail, self._seed = tail, seed
        self._channel = channel if self._changes_between_epochs() else None
        self._rows: dict[int, int] = {}  # of the batches whose rows were counted
        self._has_tail: bool | None = None
        self.division: Division | None = None
        first = position.epoch if position else 0
        self._begin(first, 0)
        total = data.num_batches
        is_resumed = total is not None and position is not None
        self.is_marked = tail.is_marked(
            int(total or 0) % tail.per_step, is_resumed=is_resumed
        )
        if total is not None and keeps_position:
            self.division = Division.of_batches(
                position,
                int(total),
                size=tail.size,
                per_step=tail.per_step,
                steps_after=lambda read: self._steps_after(first, read),
            )
            self._begin(first, 0)

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes make batches and take no part in collectives.
        return self.__dict__ | {"_channel": None}

    def assign(self, epoch: int) -> None:
        """Set the number of the epoch that is read from now on."""
        self._begin(epoch, self._skipped_in(epoch))

    def batches_at(self, epoch: int, step: int) -> list[int]:
        """Name the user's batches that this rank reads at a step of an epoch."""
        order, size = self._order_of(epoch), self._tail.per_step
        rank = self._tail.rank % size
        begin, total = step * size + self._skipped_in(epoch), self.data.num_batches
        own = batches_of_step(begin, total=total, rank=rank, size=size)
        return [_index_in_order(order, index) for index in own]

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in the current epoch; `None` for infinite data."""
        if self.data.num_batches is None:
            return None
        # Keras asks before `assign` was called, and again when it begins the epoch.
        total = int(self.data.num_batches)
        full, count = divmod(total - self._skipped, self._tail.per_step)
        # Not before this is asked: batches that are left over are made to be counted.
        if self._has_tail is None:
            rows = (self._rows_of(number) for number in range(total - count, total))
            self._has_tail = bool(self._tail.has_step(count, lambda: sum(rows)))
        return full + self._has_tail

    def __getitem__(self, index: int) -> Any:
        per_step, total = self._tail.per_step, self.data.num_batches
        begin = index * per_step + self._skipped

        def batch_at(number: int) -> Any:
            return self.data[_index_in_order(self._order, begin + number)]

        if self._tail.rule == "rows":
            batch, has_rows = self._tail.rows_of(standardized(batch_at(0)))
        elif total is None or begin + per_step <= total:
            batch, has_rows = batch_at(self._tail.rank), True
        else:
            batch, has_rows = self._tail.batch(total - begin, batch_at)
        return marked(standardized(batch), has_rows) if self.is_marked else batch

    def on_epoch_begin(self) -> None:
        """Call the user's `on_epoch_begin`."""
        self.data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call the user's `on_epoch_end`; it may shuffle, the same way on all ranks.

        Raises:
            ValueError: On all ranks, if their first batches differ afterwards.
        """
        self.data.on_epoch_end()
        if self._changes_between_epochs():
            self._rows.clear()
        if self._channel is None:
            return
        fingerprints = self._channel.gather(fingerprint_of([self.data[0]]))
        if len(set(fingerprints)) > 1:
            raise ValueError(
                "After `on_epoch_end` the ranks' batches differ, so they cannot be "
                f"sharded. Received: x of type {type(self.data).__name__}. Shuffle it "
                "with a random generator that has the same seed on every rank."
            )

    def _skipped_in(self, epoch: int) -> int:
        return 0 if self.division is None else self.division.skipped_in(int(epoch))

    def _changes_between_epochs(self) -> bool:
        return type(self.data).on_epoch_end is not keras.utils.PyDataset.on_epoch_end

    def _begin(self, epoch: int, skipped: int) -> None:
        self._order, self._skipped = self._order_of(epoch), skipped
        # Other batches are the last ones now, and may have fewer rows.
        self._has_tail = None

    def _steps_after(self, epoch: int, read: int) -> int:
        self._begin(epoch, read)
        return self.num_batches or 0

    def _order_of(self, epoch: int) -> Any:
        total = self.data.num_batches
        if self._seed is None or not total:
            return None
        generator = np.random.default_rng([self._seed, int(epoch)])
        return generator.permutation(total - 1)

    def _rows_of(self, number: int) -> int:
        index = _index_in_order(self._order, number)
        if index not in self._rows:
            self._rows[index] = num_rows(self.data[index])
        return self._rows[index]


def _index_in_order(order: Any, index: int) -> int:
    is_last = order is None or index >= len(order)
    return index if is_last else int(order[index])
