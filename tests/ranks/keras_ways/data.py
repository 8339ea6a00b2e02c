"""Rows for the ways to train, and layers that several of them have."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_ways.way import ROWS


def floats(*shape: int, rows: int = ROWS, seed: int = 0) -> Any:
    """Normal numbers in the dtype of the models."""
    drawn = np.random.default_rng(seed).normal(size=(rows, *shape))
    return drawn.astype(keras.config.floatx())


def integers(high: int, *shape: int, low: int = 0, seed: int = 0) -> Any:
    """Whole numbers from `low` to `high` − 1."""
    drawn = np.random.default_rng(seed).integers(low, high, size=(ROWS, *shape))
    return drawn.astype("int32")


def padded(high: int, width: int, seed: int = 0) -> Any:
    """As `integers` from 1 on, with zeros behind the end of each row."""
    x = integers(high, width, low=1, seed=seed)
    lengths = 1 + np.arange(ROWS) * 7 % width
    return np.where(np.arange(width)[None, :] < lengths[:, None], x, 0).astype("int32")


def noise_of(x: Any, width: int) -> Any:
    """Noise that follows from each row: as good as drawn, and the same on all ranks."""
    flat = ops.reshape(x, (ops.shape(x)[0], -1))
    return ops.sin(37.0 * flat[:, :width] + 11.0)


def perceptron(*units: int, inputs: int, **last: Any) -> Any:
    """Dense layers of so many units; `last` are arguments of the last one."""
    layers = [keras.layers.Dense(count, activation="tanh") for count in units[:-1]]
    return keras.Sequential(
        [keras.Input((inputs,)), *layers, keras.layers.Dense(units[-1], **last)]
    )


def square(x: Any) -> Any:
    """Mean of the squares of each row."""
    return ops.mean(ops.square(ops.reshape(x, (ops.shape(x)[0], -1))), axis=1)
