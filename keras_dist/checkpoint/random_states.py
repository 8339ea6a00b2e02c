"""States of the global random generators of Python, NumPy and TensorFlow."""

import contextlib
import random
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.checkpoint.trees import decoded, encoded


def collected() -> dict[str, Any]:
    """The states of the generators, as a tree."""
    states = {
        "python": encoded(random.getstate()),
        "numpy": encoded(np.random.get_state(legacy=False)),
    }
    # With op determinism TensorFlow has none until the user makes it.
    with contextlib.suppress(RuntimeError):
        generator = tf.random.get_global_generator()
        states["tensorflow"] = encoded(generator.state.numpy())
    return states


def restore(states: dict[str, Any]) -> None:
    """Set the generators to the states of `collected`."""
    random.setstate(decoded(states["python"]))
    np.random.set_state(decoded(states["numpy"]))
    if "tensorflow" in states:
        with contextlib.suppress(RuntimeError, ValueError):  # another algorithm
            tf.random.get_global_generator().reset(decoded(states["tensorflow"]))
