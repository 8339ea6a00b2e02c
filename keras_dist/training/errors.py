"""Errors of one rank in a training, of which the other ranks do not know."""

import contextlib
from collections.abc import Iterator

from keras_dist import comm


@contextlib.contextmanager
def marked_as_of_one_rank() -> Iterator[None]:
    """Inside the block, which is a training, such an error is marked.

    The other ranks may wait in the collective of a step for the rank that has left it,
    so that this rank must not go on to another collective.
    """
    try:
        yield
    except Exception as error:
        if not comm.is_known(error):
            with contextlib.suppress(AttributeError):
                error._is_of_one_rank = True  # type: ignore[attr-defined]
        raise


def is_of_one_rank(error: Exception) -> bool:
    """Whether `error` has left a training on this rank, and maybe on no other."""
    return getattr(error, "_is_of_one_rank", False) and not comm.is_known(error)
