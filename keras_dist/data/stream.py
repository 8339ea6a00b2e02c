"""Data of unknown length: a pass ends when one rank has no more batch."""

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.division import DataPosition, ShardSpec
from keras_dist.data.pipeline import skip_passes, unread_passes, with_length
from keras_dist.data.round_robin import Tail, marked, num_rows
from keras_dist.data.source import Source
from keras_dist.data.stateful import Mark, Reading, Step

_MORE, _END, _ERROR = 0, 1, 2**20

# Keras takes the steps of the first epoch for those of all later ones, if it knows of
# none. Where that epoch is the rest of one, it is told of so many.
ENDLESS = 2**40


class StreamReader:
    """This rank's batches, until one rank has no more: all ranks stop at once.

    If one rank ended earlier, the others would wait for it in the next allreduce. So
    one number is summed over the ranks before each batch.

    Keras reads one epoch from each iterator. Where its position is kept and an epoch
    has a number of steps, it ends after so many, and the next one goes on behind it in
    the same pass; it ends early where the pass does, as in Keras.

    Args:
        source: The data.
        spec: The ranks, their collectives, and the position to resume from.
        tail: What this rank makes of the tail of batches that are the same on all
            ranks; `None` if all batches are this rank's own.
        is_training: Whether all ranks have to make the same number of steps. If not,
            each rank reads to the end of its own batches, without a collective.
        steps: Steps of an epoch whose position is kept; `None` for a pass.
        at_most: An upper bound of the steps of a pass, for Keras's bar; `None` if there
            is none.
        class_weight: Weights that the batches get here, if there are any: Keras would
            read ahead to add them.

    Attributes:
        failure: The error that the user's data raised, if any.
        total: Batches of all ranks in this pass, once all of them were read and dealt.
        begin: Batches of this pass that were read before this epoch.
        is_tracked: Whether `mark` tells the position.
        is_resumed: Whether the first epoch begins in the middle of a pass.
        steps: Steps of an epoch; `None` for a pass.
        counts_passes: Whether the data itself knows which pass comes next.
    """

    def __init__(
        self,
        source: Source,
        spec: ShardSpec,
        tail: Tail | None,
        *,
        is_training: bool,
        steps: int | None = None,
        at_most: int | None = None,
        class_weight: dict[int, float] | None = None,
    ) -> None:
        self.failure: Exception | None = None
        self.total: int | None = None
        self.begin = 0
        self.is_tracked = source.is_tracked and is_training
        self.is_resumed = self.is_tracked and source.resumed is not None
        self.counts_passes = source.kind == "stream"
        self.steps, self._at_most = steps, at_most
        self._class_weight = class_weight
        position = spec.position
        is_within = position is not None and position.done > 0
        self._resumed_epoch = position.epoch if position and is_within else -1
        self._first_steps = self._steps_in_first(position)
        self._passes = -1 if spec.position is None else spec.position.number - 1
        self._is_first = True
        self._unfinished: Reading | None = None
        self._has_ended = False
        self._steps: dict[int, Step] = {}
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
        if self._class_weight:
            dataset = dataset.map(weighing(self._class_weight))
        length = ENDLESS if self.is_resumed else None
        length = self.steps or self._at_most or length
        if length is not None:
            dataset = with_length(dataset, length, may_be_shorter=True)
        return dataset.with_options(options)

    def mark(self, step: int) -> Mark:
        """Return the position after a number of steps of this epoch."""
        is_dealt = self._tail is not None or self._spec.size == 1
        return self._steps[step].mark(is_dealt=is_dealt)

    def place(self, step: int) -> tuple[int, int]:
        """Return the position after a number of steps of this epoch.

        Returns:
            The number of the pass, and how many batches were read of it.
        """
        if self._has_ended:
            return self._passes + 1, 0
        return self._passes, self._steps[step].row

    @property
    def last_step(self) -> int:
        """The last step of this epoch that was read, counted from 1; 0 for none."""
        return max(self._steps, default=0)

    def steps_before(self, epoch: int) -> int:
        """Count the steps of an epoch that were trained before it was resumed."""
        is_rest = self._resumed_epoch == epoch
        return (self.steps or 0) - (self._first_steps or 0) if is_rest else 0

    def _steps_in_first(self, position: DataPosition | None) -> int | None:
        """Count what is left of the epoch in which the training goes on."""
        if self.steps is None or position is None or not position.done:
            return self.steps
        if not position.steps:  # a pass was an epoch
            return self.steps
        left = position.steps - position.done
        return -(-left * self.steps // position.steps)

    def forget(self, step: int) -> None:
        """Forget the steps before one that was trained."""
        for number in [each for each in list(self._steps) if each < step]:
            del self._steps[number]

    def _begun(self) -> tuple[Reading | None, Iterator[Any]]:
        """Begin a pass, or the rest of one; return what reads it, and own batches."""
        previous = self._previous()
        self._steps, self.begin, self._has_ended = {}, 0, False
        reading = None
        if self.is_tracked:
            resumed, self._source.resumed = self._source.resumed, None
            left, self._unfinished = self._unfinished, None
            self._passes += left is None
            if not self._is_first and left is None and self.steps is None:
                self._skip_unread()
            self._is_first = False
            reading = resumed or left or Reading(self._source, None, 0, previous)
            self.begin = reading.read
        batches = iter(self._source) if reading is None else reading
        if self._tail is None:
            return reading, map(self._source.as_read, batches)
        return reading, self._round_robin(self._tail, batches)

    def _previous(self) -> Mark | None:
        """Return the end of the pass before; `None` where no later pass needs it."""
        if not self.counts_passes or not self.is_tracked:
            return None
        if not self._steps:
            return self._source.passed
        return replace(self.mark(self.last_step), previous=None)

    def _skip_unread(self) -> None:
        """Begin the pass that Keras begins between two epochs, and does not read."""
        source = self._source
        if source.has_seeded_passes:
            skip_passes(source.data, unread_passes(source.data))

    def _batches(self) -> Iterator[Any]:
        steps = self._first_steps if self._is_first else self.steps
        reading, own = self._begun()
        step = 0
        while steps is None or step < steps:
            batch, state, message = None, _MORE, None
            try:
                if reading is not None:
                    reading.begin_step()
                batch = next(own, None)
                state = _END if batch is None else _MORE
                if reading is not None and batch is not None:
                    self._steps[step + 1] = reading.step()
            except Exception as error:  # any error is sent to the other ranks
                self.failure = error
                state, message = _ERROR, f"{type(error).__name__}: {error}"
            if self._goes_on(step, state, message, batch):
                step += 1
                if step == steps:  # no more is asked for
                    self._unfinished = reading
                yield batch
            elif self.begin and step == 0 and steps is not None:
                reading, own = self._begun()  # the pass ended with the epoch before
            else:
                self._has_ended = True
                return

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
        read, self.total = self.begin, None
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


def weighing(class_weight: dict[int, float]) -> Any:
    """Return a function that adds the weights of the rows' classes to a batch."""
    tail = Tail("rows", 0, 1, True, class_weight)

    @tf.autograph.experimental.do_not_convert
    def weighted(*batch: Any) -> Any:
        return tail.weighted(batch)

    return weighted


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
