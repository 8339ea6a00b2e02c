"""Counters of a fit: rows trained on, batches that metrics have seen, steps."""

from typing import Any

import tensorflow as tf

from keras_dist.optimizer.step_context import own_variable
from keras_dist.training.metrics import UpdateCounts


class RowsTrained:
    """Counts the rows that this rank has trained on in this epoch.

    They are the weights of averaged statistics, and `Throughput` divides them by the
    time.
    """

    def __init__(self) -> None:
        self._count = _counter(0)
        self._restored = 0

    def begin_epoch(self) -> None:
        """Count from 0 again."""
        self._count.assign(0)
        self._restored = 0

    def add(self, rows: Any) -> None:
        """Add the rows of a train step; in a graph or not."""
        self._count.assign_add(tf.cast(rows, tf.int64))

    def restore(self, rows: int) -> None:
        """Add rows of this epoch that the process before a resume has trained on."""
        self._restored = rows
        self._count.assign_add(rows)

    def as_tensor(self) -> Any:
        """Rows of this epoch, including restored ones."""
        return self._count.read_value()

    def total(self) -> int:
        """The same as a number; this waits for the last step."""
        return int(self._count.numpy())

    def of_this_process(self) -> int:
        """Rows of this epoch without restored ones."""
        return self.total() - self._restored


class RowsSeen:
    """Counts the batches and rows that the metrics have seen since they were reset.

    It is reused by the next fit if that reuses the traced test function, which adds to
    this object's variable.
    """

    def __init__(self) -> None:
        self._counts = _counter([0, 0, 0])

    def reset(self) -> None:
        """Count from 0 again: the metrics were reset."""
        self._counts.assign([0, 0, 0])

    def add(self, rows: Any) -> None:
        """Add a batch of `rows` rows; in a graph or not."""
        rows = tf.cast(rows, tf.int64)
        steps, so_far, _ = tf.unstack(self._counts.read_value())
        self._counts.assign(tf.stack([steps + 1, so_far + rows, rows]))

    def restore(self, counts: list[int]) -> None:
        """Continue from the result of `counts` of another process."""
        self._counts.assign(counts)

    def counts(self) -> list[int]:
        """Batches, rows, and rows of the last batch."""
        return self._counts.numpy().tolist()

    def seen(self, *, has_rows: bool) -> UpdateCounts:
        """The counts, in the form in which they are sent to the other ranks.

        Args:
            has_rows: `False` if this rank evaluated a row of another rank.
        """
        steps, rows, last_rows = self.counts()
        return UpdateCounts(rows, steps, last_rows, has_rows)


class TrainingData:
    """The training data, and the number of the next step.

    Args of `use`:
        feed: A `Feed`: this rank's training data.
    """

    def __init__(self) -> None:
        self._step = _counter(0)
        self.feed: Any = None

    def use(self, feed: Any) -> None:
        """Set the training data."""
        self.feed = feed

    def without_mark(self, data: Any) -> tuple[Any, Any]:
        """The batch, and whether it is one of this rank's; `None` if it surely is."""
        if self.feed is None or not self.feed.is_marked:
            return data, None
        batch, mark = data
        return batch, tf.cast(tf.reshape(mark, []), tf.bool)

    def begin_epoch(self, epoch: int, steps: int | None) -> None:
        """Set the next step to the first one of `epoch`; an epoch has `steps` steps."""
        self._step.assign(epoch * (steps or 0))

    def next_rows_of_all(self) -> Any:
        """Rows that all ranks read in the next step; `None` if unknown.

        It also increments the number of the step; in a graph or not.
        """
        if self.feed is None or self.feed.rows_of_all is None:
            return None
        rows = self.feed.rows_of_all(self._step.read_value())
        self._step.assign_add(1)
        return rows


def _counter(value: Any) -> tf.Variable:
    # Made outside of any graph. Keras does not track it, or it would be saved.
    with tf.init_scope():
        return own_variable(value, dtype=tf.int64)
