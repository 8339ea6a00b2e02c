"""A wish to stop travels with the gradients, since all ranks must stop together."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

# Variables with the wish of this rank, and with the wishes of all that were heard. Set
# around a train step, read when the step is traced.
_request: ContextVar[tuple[Any, Any] | None] = ContextVar("stop_request", default=None)


@contextlib.contextmanager
def sent_with_gradients(own: Any, agreed: Any) -> Iterator[None]:
    """Inside the block, gradients that are averaged take a wish with them.

    Args:
        own: A variable, 1.0 where this rank wishes to stop and else 0.0.
        agreed: A variable to which the wishes of all ranks are added.
    """
    token = _request.set((own, agreed))
    try:
        yield
    finally:
        _request.reset(token)


def own_stop_request(dtype: Any) -> list[Any]:
    """This rank's stop request as one scalar to be summed; none outside of a step."""
    stop_request = _request.get()
    return (
        [] if stop_request is None else [tf.cast(stop_request[0].read_value(), dtype)]
    )


def collect(total: Any) -> None:
    """Add up what all ranks wished, at an update that all ranks make."""
    stop_request = _request.get()
    if stop_request is not None:
        stop_request[1].assign_add(tf.cast(total, stop_request[1].dtype))
