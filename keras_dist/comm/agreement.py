"""Wait for all ranks, compare values between them, and let the first rank go first."""

import contextlib
import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dist.comm import runtime
from keras_dist.comm.collectives import exchange, raise_on_all
from keras_dist.errors import mark_known


@contextlib.contextmanager
def wait_for_all_ranks(call: str = "wait_for_all_ranks") -> Iterator[None]:
    """Context manager that ends when all ranks are at its end, or raises on all.

    The blocks need not be the same lines of code on all ranks.

    Args:
        call: What the ranks wait for, as in `exchange`.

    Raises:
        Exception: If the block failed on this rank, its error. Otherwise `RankError`.
    """
    with raise_on_all():
        yield
    with tf.init_scope():  # a block may be in a graph that is being traced
        exchange(None, call)


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
    local_facts = dict(facts)
    digest = hashlib.sha256(pickle.dumps(local_facts)).digest()  # bytes, no error
    # One short message of each rank where all is well, however many facts there are.
    if len(set(exchange(digest, "agree"))) == 1:
        return
    check_equal(exchange(local_facts, "agree"), advice=advice, names=names)


def check_equal(
    per_rank: Sequence[Mapping[str, Any]],
    *,
    advice: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """Raise the error of `agree` if some value differs; without a collective.

    Args:
        per_rank: The values of each rank, which all ranks have.
        advice: See `agree`.
        names: See `agree`.
    """
    for name in dict.fromkeys(name for facts in per_rank for name in facts):
        values = [facts.get(name, "nothing") for facts in per_rank]
        if any(value != values[0] for value in values):
            received = "; ".join(f"rank {r}: {value}" for r, value in enumerate(values))
            also = f" ({names[name]})" if names and name in names else ""
            error = ValueError(
                f"The ranks disagree on {name}{also}. Received: {received}. {advice}"
            )
            mark_known(error)
            raise error


def agree_on_variables(variables: Sequence[Any], facts: Mapping[str, Any]) -> None:
    """Raise the same error on all ranks if variables differ in number, shape or dtype.

    Args:
        variables: Of Keras or TensorFlow.
        facts: More values that must be equal on all ranks, as in `agree`.
    """
    kinds = [f"{tuple(v.shape)} {tf.as_dtype(v.dtype).name}" for v in variables]
    shapes = {f"the shape of variable {i}": kind for i, kind in enumerate(kinds)}
    agree(
        {**facts, "the number of variables": len(kinds), **shapes},
        advice="Create the same model and the same optimizer on every rank. Weights of "
        "the size of a batch need one process (keras-dist run -np 1).",
    )


@contextlib.contextmanager
def first_rank() -> Iterator[bool]:
    """Context manager whose block runs on the first rank before the other ranks.

    Python cannot skip a `with` block, so the other ranks run it too, after the first
    rank has left it. With `if is_first:`, they do nothing in it. Without, they repeat
    it after the first rank, which suits a download into a cache. All ranks leave the
    block when the last rank is done.

    An error in the block is raised on all ranks. All ranks have to enter the block, and
    it must not contain a collective.

    Returns:
        A context manager, whose value is whether this is the first rank.

    Raises:
        Exception: On all ranks, if the block failed on one rank. That rank raises its
            own error; the other ranks raise an error that begins with "On rank" and is
            a `ValueError`, a `TypeError` and a `RuntimeError`. If the first rank fails,
            no other rank enters the block.

    Example:

    >>> with first_rank() as is_first:
    ...     if is_first:
    ...         print("written once")
    written once
    """
    is_first = runtime.rank() == 0
    if not is_first:
        exchange(None, "first_rank")  # while the first rank is in its block
    with wait_for_all_ranks("first_rank"), runtime.without_collectives():
        yield is_first
    if is_first:
        exchange(None, "first_rank")  # while the others are in theirs
