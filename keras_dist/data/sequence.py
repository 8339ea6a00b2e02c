"""A `keras.utils.PyDataset`, of which each rank reads its own batches by index."""

from typing import Any

import keras
import numpy as np

from keras_dist.data.dealer import Dealer, marked
from keras_dist.data.division import Channel, DataPosition, Division
from keras_dist.data.source import Declared, fingerprint_of, standardized


class ShardedSequence(Declared, keras.utils.PyDataset):
    """This rank's batches of a `PyDataset`; no batch of another rank is made.

    In step i, rank r of N reads the batch of index i × N + r; or each rank makes every
    batch, and keeps its rows of it.

    With `seed`, the order of the batches is a function of the seed and the epoch alone,
    so it is the same on every rank and for every number of ranks. The last batch stays
    the last one, because it may be smaller.

    Args:
        data: The user's `PyDataset`, with the same batches on all ranks.
        dealer: What this rank reads of the batches.
        seed: Seed of the order, which changes from epoch to epoch; `None` to keep it.
        channel: Collectives, to compare batches that the user's `on_epoch_end` changes.
        position: Where to resume, if a training is resumed.
        keeps_position: Whether to make a `division`, if there is an end.
    """

    def __init__(
        self,
        data: Any,
        dealer: Dealer,
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
        self._dealer, self._seed = dealer, seed
        self._channel = channel if self._changes_between_epochs() else None
        self.division: Division | None = None
        total = data.num_batches
        is_resumed = total is not None and position is not None
        self.is_marked = dealer.is_marked(int(total or 0), is_resumed=is_resumed)
        if total is not None and keeps_position:
            self.division = Division.of(
                position,
                int(total),
                per_step=dealer.per_step,
                size=dealer.size,
                unit="batches",
            )
        self.assign(position.epoch if position else 0)

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes make batches and take no part in collectives.
        return self.__dict__ | {"_channel": None}

    def assign(self, epoch: int) -> None:
        """Set the number of the epoch that is read from now on."""
        division = self.division
        self._skipped = 0 if division is None else division.skipped_in(int(epoch))
        self._order = self._order_of(epoch)

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in the current epoch; `None` for infinite data."""
        if self.data.num_batches is None:
            return None
        # Keras asks before `assign` was called, and again when it begins the epoch.
        return self._dealer.num_steps(int(self.data.num_batches) - self._skipped)

    def __getitem__(self, index: int) -> Any:
        per_step, total = self._dealer.per_step, self.data.num_batches
        begin = index * per_step + self._skipped
        count = per_step if total is None else min(per_step, int(total) - begin)

        def batch_at(number: int) -> Any:
            batch = self.data[self._index(begin + number)]
            is_plain = not self.is_marked and self._dealer.class_weight is None
            return batch if is_plain else standardized(batch)

        own = self._dealer.take(count, batch_at)
        assert own is not None  # `num_batches` counts those that there are
        return marked(*own) if self.is_marked else own[0]

    def on_epoch_begin(self) -> None:
        """Call the user's `on_epoch_begin`."""
        self.data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call the user's `on_epoch_end`; it may shuffle, the same way on all ranks.

        Raises:
            ValueError: On all ranks, if their first batches differ afterwards.
        """
        self.data.on_epoch_end()
        if self._channel is None:
            return
        fingerprints = self._channel.gather(fingerprint_of([self.data[0]]))
        if len(set(fingerprints)) > 1:
            raise ValueError(
                "After `on_epoch_end` the ranks' batches differ, so they cannot be "
                f"sharded. Received: x of type {type(self.data).__name__}. Shuffle it "
                "with a random generator that has the same seed on every rank."
            )

    def _changes_between_epochs(self) -> bool:
        return type(self.data).on_epoch_end is not keras.utils.PyDataset.on_epoch_end

    def _order_of(self, epoch: int) -> Any:
        """Return the order of all batches but the last, which may be smaller."""
        total = self.data.num_batches
        if self._seed is None or not total:
            return None
        generator = np.random.default_rng([self._seed, int(epoch)])
        return generator.permutation(total - 1)

    def _index(self, number: int) -> int:
        """Find the user's index of the batch that has a number in the order."""
        is_last = self._order is None or number >= len(self._order)
        return number if is_last else int(self._order[number])
