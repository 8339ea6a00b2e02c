"""The stop request that a train step carries."""

from typing import Any

import tensorflow as tf

from keras_dist.optimizer.step_context import internal_variable


class StopRequest:
    """The stop request of one rank, until all ranks act on it after the same step.

    If one rank left Keras's loop first, the others would wait for it in the next
    allreduce. So a request goes through three states:

    1. *requested*: this rank has called `ask`, or `ask_to_save` for a checkpoint;
    2. *agreed*: the sum of all requests came with the gradients of an update
       (`collect`), on all ranks in the same step;
    3. *done*: the ranks act on it (`grant`, `clear`).
    """

    def __init__(self) -> None:
        # On the CPU, since it is read after each batch. Keras does not save it.
        with tf.init_scope(), tf.device("CPU:0"):
            self._own = internal_variable(0.0)
            self._agreed = internal_variable(0.0)
        self._is_asked = False
        self._is_collective = False

    def reset(self) -> None:
        """Begin a fit: nothing is requested."""
        self._is_asked = self._is_collective = False
        self.clear()

    @property
    def is_asked(self) -> bool:
        """True if this rank has requested to stop."""
        return self._is_asked

    @property
    def is_collective(self) -> bool:
        """True if this rank stops only when all ranks have agreed."""
        return self._is_collective

    def make_collective(self, is_collective: bool) -> None:
        """Set whether all ranks have to agree before a request ends the training."""
        self._is_collective = is_collective

    def ask(self, is_asked: bool) -> None:
        """Request to stop, or withdraw the request; sent with the next update."""
        self._is_asked = is_asked
        with tf.init_scope():
            self._own.assign(float(is_asked))

    def ask_to_save(self) -> None:
        """Make all ranks gather their save requests after the next update."""
        self._own.assign(1.0)

    def as_tensor(self, dtype: Any) -> Any:
        """1 if this rank has a request, else 0: a scalar tensor, to be summed."""
        return tf.cast(self._own.read_value(), dtype)

    def collect(self, total: Any) -> None:
        """Store the sum of all ranks' requests, in an update that all ranks make."""
        self._agreed.assign_add(tf.cast(total, self._agreed.dtype))

    def is_agreed(self) -> bool:
        """Tell whether a request of some rank has reached all ranks; equal on all."""
        return tf.executing_eagerly() and float(self._agreed.numpy()) > 0

    def grant(self, model: Any, *, is_agreed: bool) -> None:
        """Set `stop_training` of `model` for Keras's loop; equal on all ranks.

        This rank's own request stays until it is withdrawn.
        """
        model.__dict__["stop_training"] = is_agreed
        self._agreed.assign(0.0)

    def clear(self) -> None:
        """Drop requests that were acted on; all ranks call this after the same step."""
        self._own.assign(0.0)
        self._agreed.assign(0.0)
