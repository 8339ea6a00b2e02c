"""Errors that one rank has and all ranks raise, and errors of arguments."""

import contextlib
from collections.abc import Collection
from typing import Any


class RankError(ValueError, TypeError, RuntimeError):
    """An error of another rank; it can be caught as most errors on that rank can.

    Args:
        rank: The first rank that failed.
        cause: Its error in words, as `describe` returns it.
    """

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"On rank {rank}: {cause}")
        self.rank, self.cause = rank, cause


def describe(error: Exception) -> str:
    """Describe an error for other ranks: class, message and notes.

    The class is left out of those that a `RankError` is.

    >>> describe(KeyError("tea")), describe(ValueError("no more tea"))
    ("KeyError: 'tea'", 'no more tea')
    """
    name = type(error).__name__
    is_plain = name in ("ValueError", "TypeError", "RuntimeError", "RankError")
    text = str(error) if is_plain else f"{name}: {error}"
    return "\n".join([text, *getattr(error, "__notes__", ())])


def summarize(error: Exception) -> str:
    """Return the class of an error, and the first line of its message.

    >>> summarize(NotImplementedError()), summarize(KeyError("tea"))
    ('NotImplementedError', "KeyError: 'tea'")
    """
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}".rstrip(": ")


def mark_known(error: Exception) -> None:
    """Note that an error is raised on all ranks, so that none tells the others."""
    with contextlib.suppress(AttributeError):  # a class of C may take no attribute
        error._is_known_to_all_ranks = True  # type: ignore[attr-defined]


def is_known(error: Exception) -> bool:
    """Return True if an error was already raised on all ranks."""
    return getattr(error, "_is_known_to_all_ranks", False)


def read_number(value: Any, *, name: str, unit: str) -> float:
    """Return the number that an option or an environment variable holds.

    Raises:
        ValueError: If it is not a number, or negative.
    """
    with contextlib.suppress(TypeError, ValueError):
        if (number := float(value)) >= 0:
            return number
    raise ValueError(
        f"`{name}` must be a number of {unit}, at least 0. Received: {name}={value!r}"
    )


def check_count(name: str, value: Any) -> int:
    """Return a number of rows or steps, or raise a `ValueError`."""
    is_whole = not isinstance(value, bool) and hasattr(value, "__index__")
    if not is_whole or value < 1:
        raise ValueError(
            f"`{name}` must be a whole number of at least 1. Received: {name}={value!r}"
        )
    return int(value)


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise a `ValueError` if a value is none of the choices."""
    if value not in choices:
        shown = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {shown}. Received: {name}={value!r}")
