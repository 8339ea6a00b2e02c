"""Which batches come at which step of a training, also of a resumed one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist.data.arrays_schedule import DataPosition
from keras_dist.data.batches_known_length import with_length, without_auto_shard


@dataclass(frozen=True)
class BatchSchedule:
    """Which batches all ranks read in each epoch, where an epoch is one pass.

    Args:
        length: Batches of all ranks in a pass.
        size: Number of ranks.
        steps: Steps of a whole epoch.
        epoch: Number of the first epoch.
        first_steps: Steps of the first epoch that are left.
        skipped: Batches of the first epoch that were read before the training was
            resumed.
    """

    length: int
    size: int
    steps: int
    epoch: int
    first_steps: int
    skipped: int

    @property
    def is_within_epoch(self) -> bool:
        """Whether the training resumes in the middle of an epoch."""
        return self.skipped > 0

    def steps_of_epoch(self, epoch: int, _: Any = None) -> int:
        """Steps of an epoch; same signature as `EpochSchedule.steps_of_epoch`."""
        return self.first_steps if epoch == self.epoch else self.steps

    def skipped_in(self, epoch: int) -> int:
        """Batches of an epoch that were read before the training was resumed."""
        return self.skipped if epoch == self.epoch else 0

    def position(self, epoch: int, done: int) -> DataPosition:
        """The position after `done` steps of an epoch of this schedule."""
        steps = self.steps_of_epoch(epoch)
        if done >= steps:
            return DataPosition(epoch + 1, 0, self.steps, epoch + 1, 0, self.length)
        batches_read = done * self.size + self.skipped_in(epoch)
        done += self.steps - steps
        return DataPosition(epoch, done, self.steps, epoch, batches_read, self.length)


def batch_schedule_of(
    position: DataPosition | None,
    *,
    length: int,
    size: int,
    steps_after: Callable[[int], int | None],
) -> BatchSchedule | None:
    """The schedule of a training that resumes at `position`, or of a new one.

    Args:
        position: Where to resume, perhaps saved by another number of ranks; `None` for
            a new training.
        length: Batches of all ranks in a pass.
        size: Number of ranks, now.
        steps_after: Function of a number of batches. It returns the steps of the rest
            of a pass of which so many batches have been read, or `None` if unknown.

    Returns:
        The schedule, or `None` if the number of steps is unknown.

    Raises:
        ValueError: If `position` is in the middle of an epoch of other data.
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
    if not left:  # fewer rows are left than there are ranks: they are left out
        return BatchSchedule(length, size, steps, position.epoch + 1, steps, 0)
    return BatchSchedule(length, size, steps, position.epoch, left, position.row)


def rest_and_whole(
    rest: tf.data.Dataset,
    whole: tf.data.Dataset,
    *,
    epoch: tf.Variable,
    schedule: BatchSchedule,
) -> tf.data.Dataset:
    """One data set that yields `rest` in the first epoch, and `whole` in later ones.

    Args:
        rest: Batches of the epoch in which the training is resumed.
        whole: Batches of a whole epoch.
        epoch: An int64 variable. An iterator reads the epoch whose number it holds when
            the iterator is made.
        schedule: Says which epoch is the first.
    """
    take_none, take_all = tf.constant(0, tf.int64), tf.constant(-1, tf.int64)

    @tf.autograph.experimental.do_not_convert
    def batches_of_epoch(_: tf.Tensor) -> tf.data.Dataset:
        is_first = tf.equal(epoch.read_value(), schedule.epoch)
        of_rest = rest.take(tf.where(is_first, take_all, take_none))
        of_whole = whole.take(tf.where(is_first, take_none, take_all))
        return of_rest.concatenate(of_whole)

    dataset = tf.data.Dataset.range(1).flat_map(batches_of_epoch)
    dataset = with_length(
        dataset, schedule.steps, may_be_shorter=schedule.is_within_epoch
    )
    return without_auto_shard(dataset)
