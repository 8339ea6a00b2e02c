"""A wish to stop travels with the gradients, since all ranks must stop together."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

# Variables with the wish of this rank, and with the wishes of all that were heard. Set
# around a train step, read when the step is traced.
_wish: ContextVar[tuple[Any, Any] | None] = ContextVar("wish", default=None)


@contextlib.contextmanager
def carrying(own: Any, heard: Any) -> Iterator[None]:
    """Inside the block, gradients that are averaged take a wish with them.

    Args:
        own: A variable, 1.0 where this rank wishes to stop and else 0.0.
        heard: A variable to which the wishes of all ranks are added.
    """
    token = _wish.set((own, heard))
    try:
        yield
    finally:
        _wish.reset(token)


def own_wish(dtype: Any) -> list[Any]:
    """The wish of this rank as one scalar to be summed; none outside of `carrying`."""
    wish = _wish.get()
    return [] if wish is None else [tf.cast(wish[0].read_value(), dtype)]


def hear(total: Any) -> None:
    """Add up what all ranks wished, at an update that all ranks make."""
    wish = _wish.get()
    if wish is not None:
        wish[1].assign_add(tf.cast(total, wish[1].dtype))
