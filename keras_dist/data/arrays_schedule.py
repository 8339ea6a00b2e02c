"""Which rows of arrays come at which step of a training, also of a resumed one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist.data.arrays_rows import left_out_rows, rows_of_step, steps_of_rows


@dataclass(frozen=True)
class DataPosition:
    """How far a training has read its data; it does not depend on the number of ranks.

    It is saved in checkpoints. For data that comes in batches, `row` and `num_rows`
    count batches.

    Args:
        epoch: Number of the current epoch.
        done: Steps of this epoch that are done.
        steps: Steps of the whole epoch.
        number: Number of the current pass over the rows.
        row: Rows of this pass that have been read.
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
    """Which rows all ranks read in each epoch of a training, new or resumed.

    A pass reads every row once. An epoch may be shorter or longer than a pass, and then
    begins where the epoch before it ended. A resumed training begins with the rest of
    an epoch, in the middle of a pass: the first epoch and the first pass may be shorter
    than the later ones.

    Args:
        num_rows: Rows of the data.
        batch_size: Rows of one rank's batch.
        size: Number of ranks.
        steps: Steps of a whole epoch.
        epoch: Number of the first epoch.
        first_steps: Steps of the first epoch that are left.
        first_pass: Number of the first pass.
        row: Index in the first pass of the first row to read.
    """

    num_rows: int
    batch_size: int
    size: int
    steps: int
    epoch: int = 0
    first_steps: int = 0
    first_pass: int = 0
    row: int = 0

    @property
    def global_batch_size(self) -> int:
        """Rows of all ranks in a step."""
        return self.batch_size * self.size

    @property
    def steps_per_pass(self) -> int:
        """Steps of a whole pass."""
        return self._steps_of(self.num_rows)

    @property
    def steps_in_first_pass(self) -> int:
        """Steps of what is left of the first pass."""
        return self._steps_of(self.num_rows - self.row)

    @property
    def is_within_epoch(self) -> bool:
        """Whether the training resumes in the middle of an epoch."""
        return self.first_steps < self.steps

    def end_of_pass(self, row: int) -> int:
        """Index after the last row that is read in a pass that begins at `row`."""
        sizes = {"batch_size": self.batch_size, "size": self.size}
        return self.num_rows - left_out_rows(self.num_rows - row, **sizes)

    def steps_before_epoch(
        self, epoch: Any, where: Callable[..., Any] = tf.where
    ) -> Any:
        """Steps from the beginning of the schedule to the beginning of an epoch.

        Args:
            epoch: Number of the epoch, a tensor, or an integer with `where=either`.
            where: `tf.where` or `either`.
        """
        later = self.first_steps + (epoch - self.epoch - 1) * self.steps
        return where(epoch <= self.epoch, 0 * later, later)

    def steps_of_epoch(self, epoch: Any, where: Callable[..., Any] = tf.where) -> Any:
        """Steps of an epoch; arguments as of `steps_before_epoch`."""
        steps = 0 * epoch + self.steps
        return where(epoch <= self.epoch, steps - self.steps + self.first_steps, steps)

    def position(self, epoch: int, done: int) -> DataPosition:
        """The position after `done` steps of an epoch of this schedule."""
        step = self.steps_before_epoch(epoch, either) + done
        number, row = self.first_pass, self.row + step * self.global_batch_size
        if step >= self.steps_in_first_pass:
            passes, step = divmod(step - self.steps_in_first_pass, self.steps_per_pass)
            number += 1 + passes
            row = step * self.global_batch_size
        done += self.steps - self.steps_of_epoch(epoch, either)
        return DataPosition(epoch, done, self.steps, number, row, self.num_rows)

    def rows_of_step(self, step: Any) -> Any:
        """Rows of all ranks at a step (a tensor), counted from epoch 0."""
        since = step - self.epoch * self.steps  # steps since the schedule began
        is_later = since >= self.steps
        since = tf.where(is_later, since - self.steps + self.first_steps, since)
        first = self.steps_in_first_pass
        before_last = (first - 1) * self.global_batch_size
        last = self.end_of_pass(self.row) - self.row - before_last
        later = rows_of_step(
            tf.maximum(since - first, 0),
            self.num_rows,
            batch_size=self.batch_size,
            size=self.size,
        )
        is_last = tf.equal(since, first - 1)
        rows = tf.where(is_last, 0 * since + last, self.global_batch_size)
        return tf.where(since < first, rows, later)

    def _steps_of(self, num_rows: int) -> int:
        return steps_of_rows(num_rows, batch_size=self.batch_size, size=self.size)


def epoch_schedule_of(
    position: DataPosition | None,
    *,
    num_rows: int,
    batch_size: int,
    size: int,
    steps: int,
) -> EpochSchedule:
    """The schedule of a training that resumes at `position`, or of a new one.

    Args:
        position: Where to resume, perhaps saved by another number of ranks; `None` for
            a new training.
        num_rows: Rows of the data.
        batch_size: Rows of one rank's batch, now.
        size: Number of ranks, now.
        steps: Steps of an epoch, now.

    Raises:
        ValueError: If `position` is in the middle of an epoch of other data.
    """
    whole = EpochSchedule(num_rows, batch_size, size, steps, first_steps=steps)
    if position is None:
        return whole
    if not (position.done or position.row):
        return _resumed(whole, position.epoch, steps, position.number, 0)
    if position.num_rows != num_rows:
        raise ValueError(
            "The training cannot go on in the middle of an epoch with other data. "
            f"Received: {num_rows} rows, and a checkpoint of a training with "
            f"{position.num_rows} rows. Pass the same data, or an empty folder."
        )
    schedule = _resumed(whole, position.epoch, steps, position.number, position.row)
    is_pass = steps == whole.steps_per_pass
    if is_pass and position.done:
        left = schedule.steps_in_first_pass
    else:
        left = -(-(position.steps - position.done) * steps // position.steps)
    if schedule.steps_in_first_pass and left:
        return _resumed(whole, position.epoch, left, position.number, position.row)
    # Fewer rows of the pass are left than there are ranks now: they are left out.
    epoch = position.epoch + bool(is_pass and position.done)
    first_steps = steps if is_pass else left
    return _resumed(whole, epoch, first_steps, position.number + 1, 0)


def _resumed(
    schedule: EpochSchedule, epoch: int, first_steps: int, first_pass: int, row: int
) -> EpochSchedule:
    sizes = (schedule.num_rows, schedule.batch_size, schedule.size, schedule.steps)
    return EpochSchedule(*sizes, epoch, first_steps, first_pass, row)


def either(condition: bool, yes: int, no: int) -> int:
    """`tf.where` for Python integers."""
    return yes if condition else no
