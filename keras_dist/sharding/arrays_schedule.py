"""Which rows come at which step of a training that may have begun elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist.sharding.arrays_rows import left_out_rows, rows_of_step, steps_of_rows


@dataclass(frozen=True)
class Position:
    """How far a training has come in its data; the number of ranks is no part of it.

    Args:
        epoch: Number of the epoch that goes on.
        done: Steps of it that have been made.
        steps: Steps that it would have had.
        number: Of the pass over the rows.
        row: Rows of that pass that have been read.
        num_rows: Rows of the data.
    """

    epoch: int
    done: int
    steps: int
    number: int
    row: int
    num_rows: int


@dataclass(frozen=True)
class EpochSchedule:
    """The way through the rows from a place on: first the rest of its pass.

    Args:
        num_rows: Rows of the data.
        batch_size: Rows of one rank's batch.
        size: Number of ranks.
        steps: Steps of a whole epoch.
        epoch: The first one.
        first_steps: Steps of it that are left.
        number: Of the first pass.
        row: The first row of that pass.
    """

    num_rows: int
    batch_size: int
    size: int
    steps: int
    epoch: int = 0
    first_steps: int = 0
    number: int = 0
    row: int = 0

    @property
    def in_a_pass(self) -> int:
        """Steps of a whole pass."""
        return self._steps_of(self.num_rows)

    @property
    def in_first_pass(self) -> int:
        """Steps of what is left of the first pass."""
        return self._steps_of(self.num_rows - self.row)

    @property
    def is_within_epoch(self) -> bool:
        """Whether the first epoch is the rest of one."""
        return self.first_steps < self.steps

    def end(self, row: int) -> int:
        """Where a pass ends that begins at a row: what comes after is left out."""
        sizes = {"batch_size": self.batch_size, "size": self.size}
        return self.num_rows - left_out_rows(self.num_rows - row, **sizes)

    def begin(self, epoch: Any, where: Callable[..., Any] = tf.where) -> Any:
        """Steps from the beginning of the course to that of an epoch."""
        later = self.first_steps + (epoch - self.epoch - 1) * self.steps
        return where(epoch <= self.epoch, 0 * later, later)

    def steps_of_epoch(self, epoch: Any, where: Callable[..., Any] = tf.where) -> Any:
        """Steps of an epoch."""
        steps = 0 * epoch + self.steps
        return where(epoch <= self.epoch, steps - self.steps + self.first_steps, steps)

    def position(self, epoch: int, done: int) -> Position:
        """Where the training is after some steps of an epoch that runs now."""
        step = self.begin(epoch, either) + done
        first = self.in_first_pass
        number, row = self.number, self.row + step * self.batch_size * self.size
        if step >= first:
            passes, step = divmod(step - first, self.in_a_pass)
            number += 1 + passes
            row = step * self.batch_size * self.size
        of_epoch = self.steps_of_epoch(epoch, either)
        return Position(
            epoch, self.steps - of_epoch + done, self.steps, number, row, self.num_rows
        )

    def rows_of_step(self, step: Any) -> Any:
        """How many rows all ranks read at a step (a tensor), counted from epoch 0."""
        since = step - self.epoch * self.steps
        is_later = since >= self.steps
        since = tf.where(is_later, since - self.steps + self.first_steps, since)
        first, in_all = self.in_first_pass, self.batch_size * self.size
        last = self.end(self.row) - self.row - (first - 1) * in_all
        later = rows_of_step(
            tf.maximum(since - first, 0),
            self.num_rows,
            batch_size=self.batch_size,
            size=self.size,
        )
        rows = tf.where(tf.equal(since, first - 1), 0 * since + last, in_all)
        return tf.where(since < first, rows, later)

    def _steps_of(self, num_rows: int) -> int:
        return steps_of_rows(num_rows, batch_size=self.batch_size, size=self.size)


def epoch_schedule_of(
    position: Position | None, *, num_rows: int, batch_size: int, size: int, steps: int
) -> EpochSchedule:
    """The course from a place on, or from the beginning.

    Args:
        position: Where the training has come to, perhaps on another number of ranks.
        num_rows: Rows of the data.
        batch_size: Rows of one rank's batch, now.
        size: Number of ranks, now.
        steps: Steps of an epoch, now.

    Raises:
        ValueError: If the place lies in the middle of other data.
    """
    begin = EpochSchedule(num_rows, batch_size, size, steps, first_steps=steps)
    if position is None:
        return begin
    if not (position.done or position.row):
        return _at(begin, position.epoch, steps, position.number, 0)
    if position.num_rows != num_rows:
        raise ValueError(
            "The training cannot go on in the middle of an epoch with other data. "
            f"Received: {num_rows} rows, and a checkpoint of a training with "
            f"{position.num_rows} rows. Pass the same data, or an empty folder."
        )
    schedule = _at(begin, position.epoch, steps, position.number, position.row)
    is_pass = steps == begin.in_a_pass
    if is_pass and position.done:
        left = schedule.in_first_pass
    else:
        left = -(-(position.steps - position.done) * steps // position.steps)
    if schedule.in_first_pass and left:
        return _at(begin, position.epoch, left, position.number, position.row)
    # Fewer rows are left of the pass than there are ranks now: nobody reads them.
    epoch = position.epoch + bool(is_pass and position.done)
    return _at(begin, epoch, steps if is_pass else left, position.number + 1, 0)


def _at(
    schedule: EpochSchedule, epoch: int, first_steps: int, number: int, row: int
) -> EpochSchedule:
    sizes = (schedule.num_rows, schedule.batch_size, schedule.size, schedule.steps)
    return EpochSchedule(*sizes, epoch, first_steps, number, row)


def either(condition: bool, yes: int, no: int) -> int:
    """`tf.where` for numbers."""
    return yes if condition else no
