"""Raise an error of one rank on all ranks, and let the first rank go first."""

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import tensorflow as tf

from keras_dist.comm import runtime
from keras_dist.comm.collectives import gather, gather_unless_equal

Result = TypeVar("Result")

# An error of one of these types has the same type on the other ranks; an error of any
# other type becomes a RuntimeError there.
_SAME_TYPE: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)
}

# Before a digest of facts.
_DIGEST = "digest of facts"


def agree(
    facts: Mapping[str, Any], *, advice: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise the same error on all ranks if some value differs between the ranks.

    Without this check such a difference ends in a hang: if one rank takes another
    number of steps, or averages another number of tensors, the other ranks wait for
    ever in a collective.

    Args:
        facts: The values that must be equal on all ranks, each by the name that the
            error message calls it.
        advice: One sentence for the error message: how to make the values equal.
        names: A second name of a value on this rank, for the error message.

    Raises:
        ValueError: On all ranks, with the first name whose values differ, and the
            value of each rank.
    """
    own_facts = dict(facts)
    digest = hashlib.sha256(pickle.dumps(own_facts)).digest()
    # One short message of each rank where all is well, however many facts there are.
    found = gather_unless_equal((_DIGEST, digest))
    if found is None:
        return
    # A rank that has failed is in `run_on_all`, and will not gather its facts.
    errors = [None if first == _DIGEST else second for first, second in found]
    _raise_first(None, errors)
    per_rank = gather(own_facts)
    for name in dict.fromkeys(name for own in per_rank for name in own):
        values = [own.get(name, "nothing") for own in per_rank]
        if any(value != values[0] for value in values):
            received = "; ".join(f"rank {r}: {value}" for r, value in enumerate(values))
            also = f" ({names[name]})" if names and name in names else ""
            raise ValueError(
                f"The ranks disagree on {name}{also}. Received: {received}. {advice}"
            )


def run_on_all(work: Callable[[], Result]) -> Result:
    """Call a function without collectives on every rank; raise its error on all ranks.

    Args:
        work: The function. It must not call a collective.

    Returns:
        What `work` returned on this rank.

    Raises:
        Exception: If `work` failed on this rank, its error. If it failed on other
            ranks only, a `ValueError`, `TypeError` or `RuntimeError` with the message
            of the first rank that failed; an error of any other type is raised as a
            `RuntimeError` whose message begins with the name of that type.
    """
    results: list[Result] = []
    gather_or_raise(lambda: results.append(work()))
    return results[0]


def gather_or_raise(work: Callable[[], Result]) -> list[Result]:
    """Call a function without collectives on every rank, and gather what it returned.

    The calls need not be the same line of code on all ranks. If a rank fails and skips
    some lines, its next call of `gather_or_raise` or `run_on_all` meets the current
    call of the other ranks, and they raise its error.

    Args:
        work: The function. It must not call a collective; what it returns must be
            picklable.

    Returns:
        What `work` returned on each rank, in rank order.

    Raises:
        Exception: As in `run_on_all`.
    """
    result, error = _attempt(work)
    per_rank: list[Any] = gather((result, _name_and_message(error)))
    _raise_first(error, [own_error for _, own_error in per_rank])
    return [own_result for own_result, _ in per_rank]


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """A `with` block whose error is raised on all ranks, when all are at its end.

    Unlike the work of `run_on_all` it may be in a graph that is being traced.

    Raises:
        Exception: As in `run_on_all`.
    """
    errors: list[Exception] = []
    try:
        yield
    except Exception as error:  # every error has to be sent to the other ranks
        errors.append(error)

    def finish() -> None:
        if errors:
            raise errors[0]

    with tf.init_scope():
        run_on_all(finish)


@contextlib.contextmanager
def first_rank() -> Iterator[bool]:
    """A `with` block that the first rank runs while the other ranks wait.

    Python has no way to skip a block, so the other ranks get to it as well: when the
    first rank has left it. With `if is_first:` they do nothing there. Without it they
    do the same after the first rank, which is what a download into a cache needs. All
    ranks leave the block when the last one has.

    An error in the block is raised on all ranks. All ranks have to come to the block,
    and nothing in it may be a collective.

    Returns:
        A context manager, whose value is whether this is the first rank.

    Raises:
        Exception: On all ranks, if the block failed on one of them. That rank raises
            its own error, the others a `ValueError`, `TypeError` or `RuntimeError` that
            begins with "On rank". If it is the first rank that failed, no other rank
            begins the block.

    Example:

    >>> with first_rank() as is_first:
    ...     if is_first:
    ...         print("written once")
    written once
    """
    if runtime.size() == 1:
        yield True
        return
    if runtime.rank() == 0:
        with failing_together(), runtime.without_collectives():
            yield True
        run_on_all(lambda: None)
    else:
        run_on_all(lambda: None)
        with failing_together(), runtime.without_collectives():
            yield False


def is_known(error: Exception) -> bool:
    """Tell whether an error was already raised on all ranks."""
    return getattr(error, "_is_known_to_all_ranks", False)


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except Exception as caught:  # every error has to be sent to the other ranks
        return None, caught


def _name_and_message(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def _raise_first(
    error: Exception | None, per_rank: list[tuple[str, str] | None]
) -> None:
    """Raise this rank's error, or the error of the first rank that has one."""
    first = next(filter(None, per_rank), None)
    if error is None and first is not None:
        kind, text = first
        message = f"On rank {per_rank.index(first)}: "
        message += text if kind in _SAME_TYPE else f"{kind}: {text}"
        error = _SAME_TYPE.get(kind, RuntimeError)(message)
    if error is not None:
        with contextlib.suppress(AttributeError):  # a class of C may take no attribute
            error._is_known_to_all_ranks = True  # type: ignore[attr-defined]
        raise error
