"""A block of the user's code that the first rank runs before the other ranks."""

import contextlib
from collections.abc import Iterator

from keras_dist.comm import runtime
from keras_dist.comm.agreement import run_on_all


@contextlib.contextmanager
def first_rank() -> Iterator[bool]:
    """A `with` block that the first rank runs while the other ranks wait.

    Python has no way to skip a block, so the other ranks get to it as well: when the
    first rank has left it. With `if is_first:` they do nothing there. Without it they
    do the same after the first rank, which is what a download into a cache needs. All
    ranks leave the block when the last one has.

    An error in the block is raised on all ranks. All ranks have to come to the block,
    and nothing in it may be a collective.

    Yields:
        Whether this is the first rank.

    Raises:
        Exception: On all ranks, if the block failed on one of them. That rank raises
            its own error, the others a `ValueError`, `TypeError` or `RuntimeError` that
            begins with "On rank". If it is the first rank that failed, no other rank
            begins the block.

    >>> with first_rank() as is_first:
    ...     if is_first:
    ...         print("written once")
    written once
    """
    if runtime.size() == 1:
        yield True
        return
    is_first = runtime.rank() == 0
    if not is_first:
        run_on_all(lambda: None)
    errors: list[Exception] = []
    try:
        with runtime.without_collectives():
            yield is_first
    except Exception as error:  # every error has to be sent to the other ranks
        errors.append(error)

    def finish() -> None:
        if errors:
            raise errors[0]

    if is_first:
        run_on_all(finish)
    run_on_all(finish)
