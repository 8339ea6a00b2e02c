"""Find out before a collective whether the ranks can do it together."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from keras_dist.comm.collectives import gather

Result = TypeVar("Result")

# Errors that another rank raises as its own kind; every other becomes RuntimeError.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)
}


def agree(
    facts: Mapping[str, Any], *, advice: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise the same error on all ranks where the ranks do not hold equal facts.

    The alternative is a hang: a rank that takes another number of steps, or averages
    another number of tensors, leaves the others waiting for ever.

    Args:
        facts: What has to be equal on all ranks, by a name for the message.
        advice: What the user can do about a difference, one sentence.
        names: What this rank calls a fact beside its name, for the message.

    Raises:
        ValueError: On all ranks, naming the first fact that differs and what each
            rank holds.
    """
    everyone = gather(dict(facts))
    for name in dict.fromkeys(name for held in everyone for name in held):
        values = [held.get(name, "nothing") for held in everyone]
        if any(value != values[0] for value in values):
            held = "; ".join(f"rank {r}: {value}" for r, value in enumerate(values))
            also = f" ({names[name]})" if names and name in names else ""
            raise ValueError(
                f"The ranks disagree on {name}{also}. Received: {held}. {advice}"
            )


def run_on_all(work: Callable[[], Result]) -> Result:
    """Do local `work` on every rank; an error on one rank is raised on all.

    Returns:
        What `work` returned on this rank.

    Raises:
        Exception: This rank's own error; or, where this rank's work succeeded, a
            `ValueError`, `TypeError` or `RuntimeError` with the message of the first
            rank that failed; for other kinds, with the kind's name before it.
    """
    results: list[Result] = []
    gather_or_raise(lambda: results.append(work()))
    return results[0]


def gather_or_raise(work: Callable[[], Result]) -> list[Result]:
    """Do local `work` on every rank, and tell all ranks what it returned.

    A rank that fails may be at another `gather_or_raise` or `run_on_all` than the
    others: its error is raised there all the same.

    Returns:
        What `work` returned on each rank, in rank order; it must be picklable.

    Raises:
        Exception: As `run_on_all`.
    """
    result, error = _tried(work)
    everyone = gather((result, _as_message(error)))
    _raise_first(error, [failure for _, failure in everyone])
    return [result for result, _ in everyone]


def is_known(error: Exception) -> bool:
    """Whether all ranks have heard of an error already."""
    return getattr(error, "_is_known_to_all_ranks", False)


def _tried(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except Exception as caught:  # any error has to be told to the other ranks
        return None, caught


def _as_message(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def _raise_first(
    error: Exception | None, everyone: list[tuple[str, str] | None]
) -> None:
    failure = next(filter(None, everyone), None)
    if error is None and failure is not None:
        kind, text = failure
        message = f"On rank {everyone.index(failure)}: "
        message += text if kind in _KINDS else f"{kind}: {text}"
        error = _KINDS.get(kind, RuntimeError)(message)
    if error is not None:
        with contextlib.suppress(AttributeError):  # a class of C may take no attribute
            error._is_known_to_all_ranks = True  # type: ignore[attr-defined]
        raise error
