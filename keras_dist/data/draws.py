"""Switch `random` and `numpy.random` between shared numbers and a rank's own.

What every rank runs draws alike: a generator or an `on_epoch_end` that shuffles would
give each rank other rows. What a rank runs for its own batches alone draws numbers of
its own: all ranks would add the same noise to different rows.
"""

import contextlib
import inspect
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

# What is not in use now: the states that all ranks share, and this rank's own.
_alike: list[Any] = []
_own: list[Any] = []


def get_states() -> Any:
    """Return the states of both generators."""
    return random.getstate(), np.random.get_state(legacy=False)


def set_states(states: Any) -> None:
    """Set the states of both generators."""
    random.setstate(states[0])
    np.random.set_state(states[1])


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
    """Context manager after which `random` and `numpy.random` go on as without it."""
    states = get_states()
    try:
        yield
    finally:
        set_states(states)


def begin_fit(states: Any) -> None:
    """Let this rank draw what all ranks draw, from states of the first one."""
    _alike.clear()
    _own.clear()
    set_states(states)


def draw_own(rank: int) -> None:
    """From now on, draw numbers that no other rank draws."""
    if not _alike:
        _alike.append(get_states())
        if _own:
            set_states(_own.pop())
        else:
            random.seed(f"{random.getrandbits(64)} {rank}")
            np.random.seed(random.getrandbits(32))


def draw_alike() -> None:
    """From now on, draw again what all ranks draw."""
    if _alike:
        _own[:] = [get_states()]
        set_states(_alike.pop())
