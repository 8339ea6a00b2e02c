"""What one train step hands to `Optimizer.apply`, through Keras's own code."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_dist import comm

if TYPE_CHECKING:
    from keras_dist.optimizer.nan_guard import Guard
    from keras_dist.optimizer.stop_request import StopRequest
    from keras_dist.optimizer.stopwatch import Stopwatch


@dataclass(frozen=True)
class StepContext:
    """What is known of the train step that is being traced or run.

    Keras calls `Optimizer.apply` with gradients and variables alone, and a user's own
    `train_step` may stand in between. So the step makes one of these, and `apply` asks
    `current()` for it. With its defaults, all ranks count alike and nobody watches.

    Args:
        rows: Rows of this rank's batch, over which its loss is a mean; a number or a
            scalar tensor. `None` where nobody knows.
        rows_of_all: Rows of the batches of all ranks, where they are known without
            asking the ranks.
        is_keras_path: Whether Keras's own code alone leads from the loss to the update:
            all gradients come from the loss that was given to `scale_loss`.
        stop_request: Is sent with the gradients.
        stopwatch: Times the exchange of gradients.
        guard: Looks at averaged gradients before they are applied.
        recorded: Where `apply` leaves its updates, instead of making them.
        is_averaged: Whether `apply` is given gradients that are averaged already.
        weighted: The optimizers' states whose loss is multiplied by this rank's
            fraction of the rows.
    """

    rows: Any = None
    rows_of_all: Any = None
    is_keras_path: bool = False
    stop_request: "StopRequest | None" = None
    stopwatch: "Stopwatch | None" = None
    guard: "Guard | None" = None
    recorded: list[Any] | None = None
    is_averaged: bool = False
    weighted: list[Any] = field(default_factory=list)

    def row_fraction(self, dtype: Any) -> Any:
        """This rank's rows over those of all ranks, from 0 to 1; a scalar tensor.

        Only where nobody knows the rows of all ranks, they are summed: one number.
        """
        if self.rows is None:
            return tf.constant(1 / comm.size(), dtype)
        rows = tf.cast(self.rows, tf.float64)
        if self.rows_of_all is None:
            return tf.cast(rows / comm.total(rows, verb="rows"), dtype)
        return tf.cast(rows / tf.cast(self.rows_of_all, tf.float64), dtype)

    def weight_loss(self, loss: Any, state: Any) -> Any:
        """The loss × this rank's fraction of the rows, where that is known beforehand.

        Args:
            loss: As Keras gives it to `scale_loss`.
            state: Of the optimizer that differentiates it.
        """
        if self.rows_of_all is None or not self.is_keras_path:
            return loss
        self.weighted.append(state)
        return loss * self.row_fraction(loss.dtype)

    def is_loss_weighted(self) -> bool:
        """Whether the loss that is differentiated now is multiplied by a fraction."""
        return bool(self.weighted)

    def is_weighted(self, state: Any) -> bool:
        """Whether an optimizer's gradients are parts of the average already."""
        return any(found is state for found in self.weighted)


# The one way from a train step to `apply`. Set around a step, read when it is traced.
_current: ContextVar[StepContext | None] = ContextVar("step_context", default=None)


def current() -> StepContext:
    """The context of the train step around this call; the default one outside."""
    return _current.get() or StepContext()


def is_inside() -> bool:
    """Whether this is called from inside of a step of training or evaluation."""
    return _current.get() is not None


@contextlib.contextmanager
def entered(context: StepContext) -> Iterator[StepContext]:
    """Inside the block, `current()` is `context`."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
