"""Read data of unknown length: a pass ends when one rank has no more batch."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data import leftover
from keras_dist.data.batches_known_length import rows_of_batches
from keras_dist.data.batches_stream import Stream, num_rows
from keras_dist.data.feed import ShardSpec

_MORE, _END, _ERROR = 0, 1, 2**20


class UnknownLengthReader:
    """This rank's batches, until one rank has no more: all ranks stop at once.

    If one rank ended earlier, the others would wait for it in the next allreduce. So
    one number is summed over the ranks before each batch.

    Args:
        stream: The data.
        spec: How data is divided among the ranks.
        is_sharded: Whether all ranks read the same batches, which are then sharded
            round robin.
        is_training: Whether all ranks have to make the same number of steps. If not,
            each rank reads to the end of its own batches, without a collective.
        rule: What becomes of batches that are left over, as `leftover.rule_of` returns
            it.

    Attributes:
        is_marked: Whether each batch comes with a mark (`leftover.marked`).
        failure: The error that the user's data raised, if any.
        total: Batches of all ranks in this pass, once its last round was read; only of
            data that is sharded.
    """

    def __init__(
        self,
        stream: Stream,
        spec: ShardSpec,
        *,
        is_sharded: bool,
        is_training: bool,
        rule: str = "cut",
    ) -> None:
        self.failure: Exception | None = None
        self.total: int | None = None
        self._stream = stream
        self._rank, self._size = spec.rank, spec.size
        self._is_sharded, self._is_training = is_sharded, is_training
        self._rule = rule
        self.is_marked = is_sharded and is_training and rule in ("whole", "either")
        # Fewer rows than ranks are left out at the end of a pass over any data.
        self._has_tail = stream.division is not None and not stream.division.is_by_file
        self._channel = spec.channel if is_training else None

    def dataset(self) -> tf.data.Dataset:
        """The batches as a data set for Keras; each iterator over it is one pass."""
        # Without reading ahead, all ranks have read as many batches when they stop.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.OFF
        )
        return tf.data.Dataset.from_generator(
            self._batches, output_signature=self._signature()
        ).with_options(options)

    def _batches(self) -> Iterator[Any]:
        own = self._round_robin() if self._is_sharded else self._unsharded()
        for step in itertools.count():
            batch, state, message = None, _MORE, None
            try:
                batch = next(own, None)
                state = _END if batch is None else _MORE
            except Exception as error:  # any error is sent to the other ranks
                self.failure = error
                state, message = _ERROR, f"{type(error).__name__}: {error}"
            if not self._goes_on(step, state, message, batch):
                return
            yield batch

    def _goes_on(self, step: int, state: int, message: str | None, batch: Any) -> bool:
        total = state if self._channel is None else self._channel.sum(state)
        if total >= _ERROR:
            everyone = (
                [message] if self._channel is None else self._channel.gather(message)
            )
            if self.failure is None:
                rank, text = next((r, t) for r, t in enumerate(everyone) if t)
                self.failure = RuntimeError(f"On rank {rank}: {text}")
            raise self.failure
        if total > 0 and total < self._size and self._channel is not None:
            rows = self._channel.gather(None if batch is None else num_rows(batch))
            if not self._has_tail or sum(filter(None, rows)) >= self._size:
                _say_what_is_dropped(step, rows, self._rank)
        return total == 0

    def _round_robin(self) -> Iterator[Any]:
        batches, num_read = iter(self._stream), 0
        needed = self._size if self._is_training else self._rank + 1
        self.total = None
        while round_of_batches := list(itertools.islice(batches, self._size)):
            if len(round_of_batches) == self._size:
                num_read += self._size
                yield self._marked(self._stream.as_read(round_of_batches[self._rank]))
                continue
            self.total = num_read + len(round_of_batches)
            left = [self._stream.as_read(batch) for batch in round_of_batches]
            is_whole = self._rule == "whole"
            if self._rule == "either":
                is_whole = not all(map(leftover.is_even, left))
            if is_whole:
                yield from leftover.whole_batches(
                    left, self._rank, is_training=self._is_training
                )
            elif self._rule != "drop" and sum(map(num_rows, left)) >= needed:
                own = rows_of_batches(left, rank=self._rank, size=self._size)
                yield self._marked(own)

    def _unsharded(self) -> Iterator[Any]:
        return map(self._stream.as_read, self._stream)

    def _marked(self, batch: Any) -> Any:
        return leftover.marked(batch, True) if self.is_marked else batch

    def _signature(self) -> Any:
        signature = self._signature_of_batch()
        return (signature, tf.TensorSpec([1], "int32")) if self.is_marked else signature

    def _signature_of_batch(self) -> Any:
        data = self._stream.data
        if isinstance(data, tf.data.Dataset):
            if self._is_sharded and self._rule == "whole":
                return data.element_spec  # no batch is cut
            return keras.tree.map_structure(_any_rows, data.element_spec)
        looks = [self._stream.as_read(batch) for batch in self._stream.first(2)]
        if not looks:
            raise ValueError(
                f"There is no data. Received: a {self._stream.kind} without a batch."
            )
        return keras.tree.map_structure(_spec_of, *looks)


def _say_what_is_dropped(step: int, rows: list[int | None], rank: int) -> None:
    ended = [str(r) for r, count in enumerate(rows) if count is None]
    dropped = ", ".join(f"{n} of rank {r}" for r, n in enumerate(rows) if n is not None)
    if rank == 0:
        warnings.warn(
            f"A pass over the data ended after {step} steps on all ranks, because "
            f"rank {' and '.join(ended)} had no more batch. Rows dropped: {dropped}, "
            "and what would have come after them.",
            stacklevel=2,
        )


def _any_rows(spec: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


def _spec_of(*leaves: Any) -> tf.TensorSpec:
    """Shape and dtype of some arrays; an axis whose lengths differ has any length."""
    if tf.is_tensor(leaves[0]):
        dtype = leaves[0].dtype
    else:
        dtype = tf.as_dtype(np.asarray(leaves[0]).dtype)
    lengths = zip(*(leaf.shape[1:] for leaf in leaves), strict=True)
    inner = [n[0] if len(set(n)) == 1 else None for n in lengths]
    return tf.TensorSpec([None, *inner], dtype)
