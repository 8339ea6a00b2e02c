"""The way through data that comes in batches, for a training that goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist.sharding.arrays_schedule import Place
from keras_dist.sharding.batches_known_length import of_length, unsharded


@dataclass(frozen=True)
class BatchCourse:
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

    def place(self, epoch: int, done: int) -> Place:
        """Where the training is after some steps of an epoch that runs now."""
        steps = self.steps_of_epoch(epoch)
        if done >= steps:
            return Place(epoch + 1, 0, self.steps, epoch + 1, 0, self.length)
        row = done * self.size + (self.skipped if epoch == self.epoch else 0)
        done += self.steps - steps
        return Place(epoch, done, self.steps, epoch, row, self.length)


def batch_course_of(
    place: Place | None,
    *,
    length: int,
    size: int,
    steps_after: Callable[[int], int | None],
) -> BatchCourse | None:
    """The course from a place on; `None` where nobody knows the steps.

    Args:
        place: Where the training has come to, perhaps on another number of ranks.
        length: Batches of a pass.
        size: Number of ranks, now.
        steps_after: Steps of a pass of which so many batches have been read.

    Raises:
        ValueError: If the place lies in the middle of other data.
    """
    steps = steps_after(0)
    if steps is None:
        return None
    if place is None or not place.done:
        epoch = 0 if place is None else place.epoch
        return BatchCourse(length, size, steps, epoch, steps, 0)
    if place.num_rows != length:
        raise ValueError(
            "The training cannot go on in the middle of an epoch with other data. "
            f"Received: {length} batches, and a checkpoint of a training with "
            f"{place.num_rows} rows or batches. Pass the same data, or an empty folder."
        )
    left = steps_after(place.row)
    if not left:  # fewer rows than ranks: nobody reads them
        return BatchCourse(length, size, steps, place.epoch + 1, steps, 0)
    return BatchCourse(length, size, steps, place.epoch, left, place.row)


def rest_and_whole(
    rest: tf.data.Dataset,
    whole: tf.data.Dataset,
    *,
    epoch: tf.Variable,
    course: BatchCourse,
) -> tf.data.Dataset:
    """The rest of the first epoch, when it is read; else all of an epoch.

    Args:
        rest: What is left of it.
        whole: An epoch.
        epoch: Number of the one that an iterator made from now on reads, int64.
        course: Which epoch is the first.
    """
    nothing, everything = tf.constant(0, tf.int64), tf.constant(-1, tf.int64)

    def choose(_: tf.Tensor) -> tf.data.Dataset:
        is_first = tf.equal(epoch.read_value(), course.epoch)
        of_rest = rest.take(tf.where(is_first, everything, nothing))
        return of_rest.concatenate(whole.take(tf.where(is_first, nothing, everything)))

    chosen = tf.data.Dataset.range(1).flat_map(choose)
    return unsharded(of_length(chosen, course.steps, course.is_within_epoch))
