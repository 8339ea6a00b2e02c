"""Random generators of Python and NumPy, which a step that is only looked at moves."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """After the block, the next random numbers are those that were next before it."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
