"""A request to stop is sent with the gradients: all ranks must stop after one step."""

from typing import Any

import tensorflow as tf


class StopRequest:
    """From the request of one rank to the moment at which all ranks stop.

    A rank that left Keras's loop alone would leave the others waiting in the next
    averaging. So a request goes through three states:

    1. *asked*: this rank asks, by `ask`, or by `ask_to_save` for a checkpoint;
    2. *agreed*: the sum of all requests came back with the gradients of an update
       (`collect`), on all ranks in the same step;
    3. *granted*: the ranks act on it (`grant`, `clear`).
    """

    def __init__(self) -> None:
        # Read after each batch, so on the CPU; no part of a model's saved state.
        with tf.init_scope(), tf.device("CPU:0"):
            self._own = tf.Variable(0.0, trainable=False)
            self._agreed = tf.Variable(0.0, trainable=False)
        self._is_asked = False
        self._is_collective = False

    @property
    def is_asked(self) -> bool:
        """Whether this rank asks to stop."""
        return self._is_asked

    @property
    def is_collective(self) -> bool:
        """Whether this rank stops only when all ranks have agreed."""
        return self._is_collective

    def make_collective(self, is_collective: bool) -> None:
        """Say whether a request has to be agreed on before it ends the training."""
        self._is_collective = is_collective

    def ask(self, is_asked: bool) -> None:
        """Ask the ranks to stop, or take that back; sent with the next update."""
        self._is_asked = is_asked
        with tf.init_scope():
            self._own.assign(float(is_asked))

    def ask_to_save(self) -> None:
        """Ask the ranks what to do after the next update, without asking to stop."""
        self._own.assign(1.0)

    def as_tensor(self, dtype: Any) -> Any:
        """1 where this rank asks, else 0: a scalar tensor, to be summed."""
        return tf.cast(self._own.read_value(), dtype)

    def collect(self, total: Any) -> None:
        """Take in the sum of all ranks' requests, in an update that all ranks make."""
        self._agreed.assign_add(tf.cast(total, self._agreed.dtype))

    def is_agreed(self) -> bool:
        """Whether some rank's request has come back to all ranks; equal on all."""
        return tf.executing_eagerly() and float(self._agreed.numpy()) > 0

    def grant(self, model: Any, *, is_agreed: bool) -> None:
        """Let Keras's loop of `model` see whether training stops; equal on all ranks.

        The request of this rank stays until it is taken back.
        """
        model.__dict__["stop_training"] = is_agreed
        self._agreed.assign(0.0)

    def clear(self) -> None:
        """Forget requests that were acted on; called by all ranks after one step."""
        self._own.assign(0.0)
        self._agreed.assign(0.0)
