"""What is counted while a model trains: rows, batches that metrics saw, steps."""

from typing import Any

import tensorflow as tf

from keras_dist.metrics import Seen


class RowsTrained:
    """Rows that this rank has trained on in this epoch.

    Statistics are averaged by them, and `Throughput` divides them by the time.
    """

    def __init__(self) -> None:
        self._count = _counter(0)
        self._restored = 0

    def begin_epoch(self) -> None:
        """Count from 0 again."""
        self._count.assign(0)
        self._restored = 0

    def add(self, rows: Any) -> None:
        """A train step has read so many rows; in a graph or not."""
        self._count.assign_add(tf.cast(rows, tf.int64))

    def restore(self, rows: int) -> None:
        """Another process has trained on so many rows of this epoch."""
        self._restored = rows
        self._count.assign_add(rows)

    def as_tensor(self) -> Any:
        """Rows of this epoch, also those of another process."""
        return self._count.read_value()

    def total(self) -> int:
        """The same as a number; it waits for the last step."""
        return int(self._count.numpy())

    def of_this_process(self) -> int:
        """Rows that this process has trained on, which took its time."""
        return self.total() - self._restored


class RowsSeen:
    """Batches and rows that the metrics have been shown since they were reset.

    It is kept between fits together with the traced test function that counts in it.
    """

    def __init__(self) -> None:
        self._counts = _counter([0, 0, 0])

    def reset(self) -> None:
        """The metrics were reset."""
        self._counts.assign([0, 0, 0])

    def add(self, rows: Any) -> None:
        """Metrics are shown a batch of so many rows; in a graph or not."""
        rows = tf.cast(rows, tf.int64)
        steps, so_far, _ = tf.unstack(self._counts.read_value())
        self._counts.assign(tf.stack([steps + 1, so_far + rows, rows]))

    def restore(self, counts: list[int]) -> None:
        """Go on from what `counts` gave."""
        self._counts.assign(counts)

    def counts(self) -> list[int]:
        """Batches, rows, and rows of the last batch."""
        return self._counts.numpy().tolist()

    def seen(self, *, has_rows: bool) -> Seen:
        """The same for the other ranks.

        Args:
            has_rows: `False` where the rows were another rank's.
        """
        steps, rows, last_rows = self.counts()
        return Seen(rows, steps, last_rows, has_rows)


class TrainingData:
    """Which step of the fit comes next, and what is known of its data.

    Args of `use`:
        feed: A `sharding.Feed`: this rank's training data.
    """

    def __init__(self) -> None:
        self._step = _counter(0)
        self.feed: Any = None

    def use(self, feed: Any) -> None:
        """Say what is trained on."""
        self.feed = feed

    def begin_epoch(self, epoch: int, steps: int | None) -> None:
        """The next step is the first one of an epoch, each of `steps` steps."""
        self._step.assign(epoch * (steps or 0))

    def next_rows_of_all(self) -> Any:
        """Rows that all ranks read in the next step; `None` where nobody knows.

        It counts the step; in a graph or not.
        """
        if self.feed is None or self.feed.rows_of_all is None:
            return None
        rows = self.feed.rows_of_all(self._step.read_value())
        self._step.assign_add(1)
        return rows


def _counter(value: Any) -> tf.Variable:
    # Not in a graph, and no part of the model's tracked state: it would be saved.
    with tf.init_scope():
        return tf.Variable(value, dtype=tf.int64, trainable=False)
