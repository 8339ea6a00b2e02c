"""What the gradients of this rank count beside those of the others."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from keras_dist import comm


@dataclass
class _Known:
    """What is known of the rows of a step.

    Args:
        rows: That the gradients now being computed are a mean over.
        of_all: Those of all ranks together, where they are known beforehand.
        has_own_loss: Whether all gradients come from the loss given to `scale_loss`.
        weighed: The optimizers' states whose loss is multiplied by this rank's share.
    """

    rows: Any
    of_all: Any = None
    has_own_loss: bool = False
    weighed: list[Any] = field(default_factory=list)


# Set around a train step, read when the step is traced; `None`: all ranks count alike.
_rows: ContextVar[_Known | None] = ContextVar("rows", default=None)


@contextlib.contextmanager
def weighted_by(
    rows: Any, of_all: Any = None, *, has_own_loss: bool = False
) -> Iterator[None]:
    """Inside the block, average by `rows`, the rows in this rank's batch.

    Args:
        rows: A number, or a scalar tensor.
        of_all: The rows in the batches of all ranks, where they are known without
            asking.
        has_own_loss: Whether this is a step of Keras, which gives its loss to
            `scale_loss`, computes all gradients from that, and updates once.
    """
    token = _rows.set(_Known(rows, of_all, has_own_loss))
    try:
        yield
    finally:
        _rows.reset(token)


def rows_now() -> Any:
    """Rows that the gradients now being computed are a mean over, or `None`."""
    known = _rows.get()
    return None if known is None else known.rows


def row_fraction(dtype: Any) -> Any:
    """The part of all rows that are this rank's, from 0 to 1; a scalar tensor.

    Only where nobody knows the rows of all ranks they are summed: one number.
    """
    known = _rows.get()
    if known is None:
        return tf.constant(1 / comm.size(), dtype)
    rows = tf.cast(known.rows, tf.float64)
    if known.of_all is None:
        return tf.cast(rows / comm.total(rows, verb="rows"), dtype)
    return tf.cast(rows / tf.cast(known.of_all, tf.float64), dtype)


def weigh(loss: Any, state: Any) -> Any:
    """The loss multiplied by this rank's share where that is known, or as it is."""
    known = _rows.get()
    if known is None or known.of_all is None or not known.has_own_loss:
        return loss
    known.weighed.append(state)
    return loss * row_fraction(loss.dtype)


def is_loss_weighed() -> bool:
    """Whether the loss that is now differentiated is multiplied by a share."""
    known = _rows.get()
    return known is not None and bool(known.weighed)


def is_weighed(state: Any) -> bool:
    """Whether the gradients now being computed are parts of the average already."""
    known = _rows.get()
    return known is not None and any(found is state for found in known.weighed)
