"""What the gradients of this rank count beside those of the others."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from keras_dist import comm

# Rows that the gradients now being computed are a mean over, and those of all ranks
# together where they are known beforehand; `None`: all ranks count alike. Set around a
# train step, read when the step is traced.
_rows: ContextVar[tuple[Any, Any] | None] = ContextVar("rows", default=None)


@contextlib.contextmanager
def weighted_by(rows: Any, of_all: Any = None) -> Iterator[None]:
    """Inside the block, average by `rows`, the rows in this rank's batch.

    Args:
        rows: A number, or a scalar tensor.
        of_all: The rows in the batches of all ranks, where they are known without
            asking.
    """
    token = _rows.set((rows, of_all))
    try:
        yield
    finally:
        _rows.reset(token)


def rows_now() -> Any:
    """Rows that the gradients now being computed are a mean over, or `None`."""
    known = _rows.get()
    return None if known is None else known[0]


def share_now(dtype: Any) -> Any:
    """The part of all rows that are this rank's, from 0 to 1; a scalar tensor.

    Only where nobody knows the rows of all ranks they are summed: one number.
    """
    known = _rows.get()
    if known is None:
        return tf.constant(1 / comm.size(), dtype)
    rows, of_all = (None if n is None else tf.cast(n, tf.float64) for n in known)
    if of_all is None:
        of_all = comm.total(rows, verb="rows")
    return tf.cast(rows / of_all, dtype)
