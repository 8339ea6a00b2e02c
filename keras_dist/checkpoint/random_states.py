"""The states of the generators of random numbers that a process has."""

import contextlib
import random
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.checkpoint.trees import decoded, encoded


def collected() -> dict[str, Any]:
    """Those of Python, NumPy and TensorFlow, as a tree."""
    states = {
        "python": encoded(random.getstate()),
        "numpy": encoded(np.random.get_state(legacy=False)),
    }
    with contextlib.suppress(RuntimeError):  # with determinism, it must be made by hand
        generator = tf.random.get_global_generator()
        states["tensorflow"] = encoded(generator.state.numpy())
    return states


def restore(states: dict[str, Any]) -> None:
    """Go on where they were."""
    random.setstate(decoded(states["python"]))
    np.random.set_state(decoded(states["numpy"]))
    if "tensorflow" in states:
        with contextlib.suppress(RuntimeError, ValueError):  # another algorithm
            tf.random.get_global_generator().reset(decoded(states["tensorflow"]))
