"""Switch random generators between numbers that ranks share and a rank's own.

These are the generators of `random` and `numpy.random`, and the one from which
TensorFlow, outside of graphs, takes the seeds of operations that are given none.

What every rank runs draws alike: a generator or an `on_epoch_end` that shuffles would
give each rank other rows. What a rank runs for its own batches alone draws numbers of
its own: all ranks would add the same noise to different rows.
"""

import contextlib
import inspect
import random
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import private

# What is not in use now: the states that all ranks share, and this rank's own.
_alike: list[Any] = []
_own: list[Any] = []

# Whether a fit on all ranks runs: another one is in a callback of it.
is_in_fit: ContextVar[bool] = ContextVar("is_in_fit", default=False)


def get_states() -> Any:
    """Return the states of all generators."""
    operations = private.operation_seed_generator()
    drawn = None if operations is None else operations.getstate()
    return random.getstate(), np.random.get_state(legacy=False), drawn


def set_states(states: Any) -> None:
    """Set the states of all generators."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    operations = private.operation_seed_generator()
    if operations is not None and states[2] is not None:
        operations.setstate(states[2])


def find_generators(data: Any) -> dict[str, str]:
    """Return the states of random generators that data has, by their names.

    They are attributes of an object, or variables of a generator function.
    """
    held = inspect.getgeneratorlocals(data) if inspect.isgenerator(data) else {}
    held = held or getattr(data, "__dict__", {})
    states: dict[str, Any] = {}
    for name, value in held.items():
        if isinstance(value, random.Random):
            states[name] = value.getstate()
        elif isinstance(value, np.random.RandomState):
            states[name] = value.get_state(legacy=False)
        elif isinstance(value, np.random.Generator):
            states[name] = value.bit_generator.state
    return {name: repr(state) for name, state in states.items()}


@contextlib.contextmanager
def preserve_generators() -> Iterator[None]:
    """Context manager after which all generators go on as without it."""
    states = get_states()
    try:
        yield
    finally:
        set_states(states)


@contextlib.contextmanager
def preserve_states(variables: Iterable[Any]) -> Iterator[None]:
    """Context manager that sets variables back, which are states of generators."""
    before = [(variable, tf.identity(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def enter_fit(states: Any) -> Iterator[None]:
    """Context manager in which this rank draws what all ranks draw.

    A fit in a callback leaves the numbers of the outer one as they were, if these are
    the rank's own.

    Args:
        states: The first rank's, from which all ranks begin.
    """
    own, outer, here, token = _own[:], _alike[:], get_states(), is_in_fit.set(True)
    _alike.clear()
    _own.clear()
    set_states(states)
    try:
        yield
    finally:
        draw_common_numbers()
        _own[:], _alike[:] = own, outer
        is_in_fit.reset(token)
        if outer:
            set_states(here)


def get_stash() -> list[list[Any]]:
    """Return the states that are not in use now, for a checkpoint."""
    return [_alike[:], _own[:]]


def set_stash(stash: list[list[Any]]) -> None:
    """Set the states that are not in use now."""
    _alike[:], _own[:] = stash


def draw_rank_numbers(rank: int) -> None:
    """From now on, draw numbers that no other rank draws."""
    if not _alike:
        _alike.append(get_states())
        if _own:
            set_states(_own.pop())
        else:
            random.seed(f"{random.getrandbits(64)} {rank}")
            np.random.seed(random.getrandbits(32))
            if operations := private.operation_seed_generator():
                operations.seed(random.getrandbits(32))


def renew_rank_numbers(rank: int) -> None:
    """Draw others where this rank's own numbers are those of another rank."""
    is_own = bool(_alike)
    draw_common_numbers()
    _own.clear()
    if is_own:
        draw_rank_numbers(rank)


def draw_common_numbers() -> None:
    """From now on, draw again what all ranks draw."""
    if _alike:
        _own[:] = [get_states()]
        set_states(_alike.pop())
