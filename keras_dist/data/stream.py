"""Data of unknown length: a pass ends when one rank has no more batch."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.division import ShardSpec
from keras_dist.data.round_robin import Tail, marked, num_rows
from keras_dist.data.source import Source

_MORE, _END, _ERROR = 0, 1, 2**20


class StreamReader:
    """This rank's batches, until one rank has no more: all ranks stop at once.

    If one rank ended earlier, the others would wait for it in the next allreduce. So
    one number is summed over the ranks before each batch.

    Args:
        source: The data.
        spec: The ranks, and their collectives.
        tail: What this rank makes of the tail of batches that are the same on all
            ranks; `None` if all batches are this rank's own.
        is_training: Whether all ranks have to make the same number of steps. If not,
            each rank reads to the end of its own batches, without a collective.

    Attributes:
        failure: The error that the user's data raised, if any.
        total: Batches of all ranks in this pass, once all of them were read and dealt.
    """

    def __init__(
        self,
        source: Source,
        spec: ShardSpec,
        tail: Tail | None,
        *,
        is_training: bool,
    ) -> None:
        self.failure: Exception | None = None
        self.total: int | None = None
        self.is_marked = tail is not None and tail.is_marked(None)
        self._source, self._spec, self._tail = source, spec, tail
        self._channel = spec.channel if is_training and spec.size > 1 else None

    def dataset(self) -> tf.data.Dataset:
        """Return the batches as a data set; each iterator over it is one pass."""
        # Without reading ahead, all ranks have read as many batches when they stop.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.OFF
        )
        signature = self._signature()
        if self.is_marked:
            signature = signature, tf.TensorSpec([1], "int32")
        dataset = tf.data.Dataset.from_generator(
            self._batches, output_signature=signature
        )
        return dataset.with_options(options)

    def _batches(self) -> Iterator[Any]:
        batches = iter(self._source)
        if self._tail is None:
            own: Iterator[Any] = map(self._source.as_read, batches)
        else:
            own = self._round_robin(self._tail, batches)
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
        channel, size = self._channel, self._spec.size
        total = state if channel is None else channel.sum(state)
        if total >= _ERROR:
            everyone = [message] if channel is None else channel.gather(message)
            if self.failure is None:
                rank, text = next((r, t) for r, t in enumerate(everyone) if t)
                self.failure = RuntimeError(f"On rank {rank}: {text}")
            raise self.failure
        if 0 < total < size and channel is not None:
            rows = channel.gather(None if batch is None else num_rows(batch))
            # Fewer rows than ranks are left out at the end of a pass over any data.
            has_tail = self._source.presharded is not None
            if self._spec.rank == 0 and not (
                has_tail and sum(filter(None, rows)) < size
            ):
                _warn_of_dropped(step, rows)
        return total == 0

    def _round_robin(self, tail: Tail, batches: Iterator[Any]) -> Iterator[Any]:
        read, self.total = 0, None
        while whole := list(itertools.islice(batches, tail.per_step)):
            read += len(whole)
            if tail.rule == "rows":
                yield self._marked(*tail.rows_of(self._source.as_read(whole[0])))
                continue
            if len(whole) == tail.size:
                yield self._marked(self._source.as_read(whole[tail.rank]), True)
                continue
            self.total = read
            left = [self._source.as_read(batch) for batch in whole]
            rows = sum(map(num_rows, left))
            own = tail.resolved(left)
            if own.has_step(len(left), lambda rows=rows: rows):  # type: ignore[misc]
                yield self._marked(*own.batch(len(left), left.__getitem__))

    def _marked(self, batch: Any, has_rows: bool) -> Any:
        return marked(batch, has_rows) if self.is_marked else batch

    def _signature(self) -> Any:
        data = self._source.data
        if isinstance(data, tf.data.Dataset):
            if self._tail is not None and self._tail.rule == "whole":
                return data.element_spec  # no batch is cut
            spec = keras.tree.map_structure(_any_rows, data.element_spec)
            if self._tail is not None and self._tail.class_weight:
                spec = (*spec[:2], tf.TensorSpec([None], "float32"))
            return spec
        looks = [self._source.as_read(batch) for batch in self._source.first(2)]
        if self._tail is not None:
            looks = [self._tail.weighted(batch) for batch in looks]
        if not looks:
            raise ValueError(
                "There is no data. Received: "
                f"a {self._source.type_name} without a batch."
            )
        return keras.tree.map_structure(_spec_of, *looks)


def _warn_of_dropped(step: int, rows: list[int | None]) -> None:
    ended = [str(rank) for rank, count in enumerate(rows) if count is None]
    dropped = ", ".join(f"{n} of rank {r}" for r, n in enumerate(rows) if n is not None)
    warnings.warn(
        f"A pass over the data ended after {step} steps on all ranks, because rank "
        f"{' and '.join(ended)} had no more batch. Rows dropped: {dropped}, and what "
        "would have come after them.",
        stacklevel=2,
    )


def _any_rows(spec: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


def _spec_of(*leaves: Any) -> tf.TensorSpec:
    """Find shape and dtype of arrays; where lengths differ, any length is allowed."""
    is_tensor = tf.is_tensor(leaves[0])
    dtype = leaves[0].dtype if is_tensor else np.asarray(leaves[0]).dtype
    lengths = zip(*(leaf.shape[1:] for leaf in leaves), strict=True)
    inner = [n[0] if len(set(n)) == 1 else None for n in lengths]
    return tf.TensorSpec([None, *inner], tf.as_dtype(dtype))
