"""The way through data that comes in batches, for a training that goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist.sharding.arrays_schedule import Position
from keras_dist.sharding.batches_known_length import of_length, unsharded


@dataclass(frozen=True)
class BatchSchedule:
    """Which batches come when, where an epoch is a pass.

    Args:
        length: Batches of a pass, all ranks' together.
        size: Number of ranks.
        steps: Steps of an epoch.
        epoch: The first one.
        first_steps: Steps of it that are left.
        skipped: Batches of it that have been read.
    """

    length: int
    size: int
    steps: int
    epoch: int
    first_steps: int
    skipped: int

    @property
    def is_within_epoch(self) -> bool:
        """Whether the first epoch is the rest of one."""
        return self.skipped > 0

    def steps_of_epoch(self, epoch: int, _: Any = None) -> int:
        """Steps of an epoch."""
        return self.first_steps if epoch == self.epoch else self.steps

    def skipped_in(self, epoch: int) -> int:
        """Batches of an epoch that were read before the training went on."""
        return self.skipped if epoch == self.epoch else 0

    def position(self, epoch: int, done: int) -> Position:
        """Where the training is after some steps of an epoch that runs now."""
        steps = self.steps_of_epoch(epoch)
        if done >= steps:
            return Position(epoch + 1, 0, self.steps, epoch + 1, 0, self.length)
        row = done * self.size + (self.skipped if epoch == self.epoch else 0)
        done += self.steps - steps
        return Position(epoch, done, self.steps, epoch, row, self.length)


def batch_schedule_of(
    position: Position | None,
    *,
    length: int,
    size: int,
    steps_after: Callable[[int], int | None],
) -> BatchSchedule | None:
    """The course from a place on; `None` where nobody knows the steps.

    Args:
        position: Where the training has come to, perhaps on another number of ranks.
        length: Batches of a pass.
        size: Number of ranks, now.
        steps_after: Steps of a pass of which so many batches have been read.

    Raises:
        ValueError: If the place lies in the middle of other data.
    """
    steps = steps_after(0)
    if steps is None:
        return None
    if position is None or not position.done:
        epoch = 0 if position is None else position.epoch
        return BatchSchedule(length, size, steps, epoch, steps, 0)
    if position.num_rows != length:
        raise ValueError(
            "The training cannot go on in the middle of an epoch with other data. "
            f"Received: {length} batches, and a checkpoint of a training with "
            f"{position.num_rows} rows or batches. Pass the same data, or an empty "
            "folder."
        )
    left = steps_after(position.row)
    if not left:  # fewer rows than ranks: nobody reads them
        return BatchSchedule(length, size, steps, position.epoch + 1, steps, 0)
    return BatchSchedule(length, size, steps, position.epoch, left, position.row)


def rest_and_whole(
    rest: tf.data.Dataset,
    whole: tf.data.Dataset,
    *,
    epoch: tf.Variable,
    schedule: BatchSchedule,
) -> tf.data.Dataset:
    """The rest of the first epoch, when it is read; else all of an epoch.

    Args:
        rest: What is left of it.
        whole: An epoch.
        epoch: Number of the one that an iterator made from now on reads, int64.
        schedule: Which epoch is the first.
    """
    nothing, everything = tf.constant(0, tf.int64), tf.constant(-1, tf.int64)

    def choose(_: tf.Tensor) -> tf.data.Dataset:
        is_first = tf.equal(epoch.read_value(), schedule.epoch)
        of_rest = rest.take(tf.where(is_first, everything, nothing))
        return of_rest.concatenate(whole.take(tf.where(is_first, nothing, everything)))

    chosen = tf.data.Dataset.range(1).flat_map(choose)
    return unsharded(of_length(chosen, schedule.steps, schedule.is_within_epoch))
