"""A `keras.utils.PyDataset`, of which each rank reads its own batches by index."""

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_dist.data import draws
from keras_dist.data.batch_rows import put_beside
from keras_dist.data.dealer import Dealer
from keras_dist.data.division import Division, ReadContext
from keras_dist.data.source import Source, digest_batches, run_alone, standardize

# The batches at which Keras looks for their shapes.
_LOOKS = 2


def has_own_thread(data: Any) -> bool:
    """Return True if Keras reads a `PyDataset` by several workers or processes."""
    if not isinstance(data, keras.utils.PyDataset):
        return False
    return data.workers > 1 or (data.workers > 0 and data.use_multiprocessing)


def _this_thread() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


class ShardedSequence(keras.utils.PyDataset):
    """This rank's batches of a `PyDataset`; no batch of another rank is made.

    In step i, rank r of N reads the batch of index i × N + r; or each rank makes every
    batch, and keeps its rows of it.

    A new order of each epoch is the one that `random` draws for Keras on one process,
    the same on all ranks. A checkpoint in the middle of an epoch has the order of that
    epoch. With a number of steps Keras itself shuffles these batches.

    Args:
        source: The user's `PyDataset`, with the same batches on all ranks.
        dealer: What this rank reads of the batches.
        context: The ranks, and where to resume.
        limit: Batches of all ranks in a pass; `None` for all that there are.
        shuffle: Whether each epoch has a new order.

    Attributes:
        order: The order of the batches in this epoch; empty without a shuffle.

    Raises:
        ValueError: If a checkpoint in the middle of an epoch lacks its order.
    """

    def __init__(
        self,
        source: Source,
        dealer: Dealer,
        context: ReadContext,
        *,
        limit: int | None,
        shuffle: bool,
    ) -> None:
        undivided = source.data
        super().__init__(
            workers=undivided.workers,
            use_multiprocessing=undivided.use_multiprocessing,
            max_queue_size=undivided.max_queue_size,
        )
        self.undivided = undivided
        self._dealer, self._limit = dealer, limit
        self._shuffle, self._first_order = shuffle, None
        # To compare batches that the user's `on_epoch_end` changes.
        is_kept = type(undivided).on_epoch_end is keras.utils.PyDataset.on_epoch_end
        is_compared = dealer.is_training and not is_kept
        self._gather_texts = context.gather if is_compared else None
        self._origin = source
        self.division: Division | None = None
        total, keeps_position = (
            self._total,
            dealer.is_training and context.keeps_position,
        )
        position = context.position if keeps_position else None
        if total is not None and keeps_position:
            self.division = Division.of(
                context, total, per_step=dealer.per_step, unit="batches"
            )
        self.order: list[int] = []
        if shuffle and position is not None and position.step:
            self._first_order = (context.facts_before or {}).get("order")
            if self._first_order is None:
                raise ValueError(
                    "The training cannot continue in the middle of an epoch whose "
                    "order of batches is unknown. Received: shuffle=True, and a "
                    "checkpoint without an order. Pass shuffle=False as before, or an "
                    "empty folder."
                )
        # Keras asks for the length before the first epoch begins: that of all others.
        with draws.preserve_generators():
            self.assign(position.epoch if position else 0)
        self._skipped, self._is_read = 0, False
        self._thread = _this_thread()
        # Whether `on_epoch_end` was called; and the first batch, if it was read.
        self._has_changed = False
        self._first: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes make batches and take no part in a collective.
        return self.__dict__ | {"_gather_texts": None, "_origin": None}

    def assign(self, epoch: int) -> None:
        """Set the number of the epoch that is read from now on."""
        division, self._skipped = self.division, 0
        if division is not None and division.epoch == epoch:
            self._skipped = division.begin  # read before the training resumed
        total = self.undivided.num_batches
        if self._shuffle and total:
            self.order = list(range(total))
            if self._first_order and division and division.epoch == epoch:
                self.order = list(self._first_order)
            else:
                random.shuffle(self.order)

    @property
    def _total(self) -> int | None:
        """Batches of all ranks in a pass; `None` for infinite data."""
        known = (n for n in (self.undivided.num_batches, self._limit) if n is not None)
        return min(map(int, known), default=None)

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in the current epoch; `None` for infinite data."""
        total = self._total
        return None if total is None else self._dealer.num_steps(total - self._skipped)

    def __getitem__(self, index: int) -> Any:
        per_step, total = self._dealer.per_step, self._total
        begin = index * per_step + self._skipped
        count = per_step if total is None else min(per_step, total - begin)

        def batch_at(number: int) -> Any:
            if self._is_read or _this_thread() != self._thread:
                batch = self._read(begin + number)
            else:  # Keras looks at the shapes, which are those of our own look
                looks = self._origin.first(_LOOKS)
                batch = looks[min(index, len(looks) - 1)]
            return standardize(batch) if self._dealer.puts_numbers else batch

        own = self._dealer.take(count, batch_at)
        assert own is not None  # `num_batches` counts those that there are
        return put_beside(*own) if self._dealer.puts_numbers else own[0]

    @run_alone()
    def _read(self, index: int) -> Any:
        """Read a batch of the user's, by its place in this epoch."""
        if self._first and index == self._skipped:
            return self._first.pop()
        return self.undivided[self.order[index] if self.order else index]

    def on_epoch_begin(self) -> None:
        """Call the user's `on_epoch_begin`.

        Raises:
            ValueError: On all ranks, if `on_epoch_end` has made their batches differ.
        """
        self.undivided.on_epoch_begin()
        self._origin.drop_looks()
        self._is_read = True
        if self._has_changed and self._gather_texts is not None:
            self._compare_first(self._gather_texts)
        if not self._dealer.splits_batches:
            # No other rank makes these batches.
            draws.draw_rank_numbers(self._dealer.rank)

    def on_epoch_end(self) -> None:
        """Call the user's `on_epoch_end`; it may shuffle, the same way on all ranks."""
        draws.draw_common_numbers()
        self._is_read, self._has_changed = False, True
        self._first.clear()
        self.undivided.on_epoch_end()

    def _compare_first(self, gather_texts: Callable[[Any], list[Any]]) -> None:
        """Compare the first batch of an epoch, which is read once where all need it."""
        if self._dealer.splits_batches and not has_own_thread(self.undivided):
            self._first = [self._read(self._skipped)]
            first = self._first[0]
        else:
            with draws.preserve_generators():
                first = self._read(self._skipped)
        leaves = tf.nest.flatten(first)
        alike = [leaf for i, leaf in enumerate(leaves) if i not in self._origin.random]
        fingerprints = gather_texts(digest_batches(alike))
        if len(set(fingerprints)) > 1:
            raise ValueError(
                "After `on_epoch_end` the ranks' batches differ, so they cannot be "
                "sharded. Received: x of type "
                f"{type(self.undivided).__name__}. Shuffle it with a random generator "
                "that has the same seed on every rank."
            )
