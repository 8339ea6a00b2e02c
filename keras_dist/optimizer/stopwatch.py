"""Times the parts of each step inside the graph, for `Throughput(breakdown=True)`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.optimizer.step_context import own_variable

_CAPACITY = 2**18  # steps of an epoch that are recorded; later ones are not


class Stopwatch:
    """Records when each step's data was ready, and how long its exchange took.

    `has_traced` is true if a step was traced in this epoch.
    """

    def __init__(self) -> None:
        self.has_traced = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._steps, self._arrivals, self._seconds = (
                own_variable(tf.zeros(shape, dtype))
                for shape, dtype in (
                    ([], tf.int64),
                    ([_CAPACITY], tf.float64),
                    ([_CAPACITY], tf.float64),
                )
            )

    def reset(self) -> None:
        """Begin an epoch."""
        self._steps.assign(0)
        self.has_traced = False

    def begin_step(self, data: Any) -> Any:
        """Record that a step has its data; return the data for what comes after."""
        self.has_traced |= not tf.executing_eagerly()
        leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
        index = tf.minimum(self._steps.read_value(), _CAPACITY - 1)
        now = _time_after(leaves)
        self._arrivals.scatter_update(tf.IndexedSlices(now, index))
        self._seconds.scatter_update(tf.IndexedSlices(tf.zeros([], now.dtype), index))
        self._steps.assign_add(1)
        with tf.control_dependencies([now]):
            # Otherwise TensorFlow might read the clock when the step is nearly over.
            return tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf), data
            )

    def begin_exchange(self, gradients: Sequence[Any]) -> Any:
        """Return the time at which this rank's gradients are ready."""
        return _time_after(gradients)

    def end_exchange(self, begin: Any, results: Sequence[Any]) -> None:
        """Add the seconds from `begin` until the averaged gradients are ready."""
        seconds = _time_after(results) - begin
        index = tf.minimum(self._steps.read_value(), _CAPACITY) - 1
        self._seconds.scatter_add(tf.IndexedSlices(seconds, index))

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """For each step, the time at which its data was ready, and seconds of exchange.

        The times are those of `time.time()`.
        """
        steps = min(int(self._steps.numpy()), _CAPACITY)
        return self._arrivals.numpy()[:steps], self._seconds.numpy()[:steps]


def _time_after(tensors: Sequence[Any]) -> Any:
    tensors = [tensor for tensor in tensors if tensor is not None]
    if tf.executing_eagerly():
        return tf.timestamp()
    with tf.control_dependencies(
        [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
    ):
        return tf.timestamp()
