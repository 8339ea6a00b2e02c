"""Models and data that the stages `truth`, `resume` and `speed` train."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

# Rows of one rank in a batch of the small models.
BATCH = 8


@dataclass(frozen=True)
class Subject:
    """A model with its data, and how far ranks may be from one process.

    Args:
        make: Makes the model for a learning rate, compiled.
        rows: Makes so many rows of `x` and `y`.
        tolerance: Largest difference of a number, relative to the largest number of
            its tensor, as in `docs/equivalence.md`.
    """

    make: Callable[[float], Any]
    rows: Callable[[int], tuple[Any, Any]]
    tolerance: float = 1e-5


def pictures(count: int) -> tuple[Any, Any]:
    """Make rows of 8×8 pictures with one of three labels."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(count, 8, 8, 1)).astype("float32")
    return x, generator.integers(0, 3, size=count)


def words(count: int) -> tuple[Any, Any]:
    """Make rows of six words, some of them frequent, with a number."""
    generator = np.random.default_rng(2)
    x = np.minimum(generator.geometric(0.2, size=(count, 6)), 30).astype("int32")
    return x, (x[:, :1] > 3).astype("float32")


def vectors(count: int) -> tuple[Any, Any]:
    """Make rows of five numbers with a number."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(count, 5)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def cnn(rate: float) -> Any:
    """Make a convolution with a synchronized BatchNormalization."""
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(8, 3, use_bias=False),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.Activation("relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3),
    ]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _compiled(layers, keras.optimizers.SGD(rate, momentum=0.9), loss)


def embedding(rate: float) -> Any:
    """Make an Embedding, whose gradient is sparse, with Adam."""
    layers = [
        keras.Input((6,), dtype="int32"),
        keras.layers.Embedding(31, 8),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    return _compiled(layers, keras.optimizers.Adam(rate, epsilon=1e-3))


def perceptron(rate: float, **arguments: Any) -> Any:
    """Make two dense layers.

    Args:
        rate: Learning rate.
        **arguments: Arguments of `compile`.
    """
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(1, dtype="float32"),
    ]
    return _compiled(layers, keras.optimizers.SGD(rate), **arguments)


def half(rate: float) -> Any:
    """Make two dense layers in mixed precision."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return perceptron(rate)
    finally:
        keras.config.set_dtype_policy(before)


def with_dropout(rate: float) -> Any:
    """Make a model that draws random numbers, with an optimizer that has state."""
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
    return _compiled(layers, keras.optimizers.Adam(rate))


# Measured in `docs/equivalence.md`: a few roundings of a number in float16, and
# statistics, which amplify rounding.
_HALF, _STATISTICS = 2.0**-8, 1e-4

SUBJECTS = {
    "CNN": Subject(cnn, pictures, _STATISTICS),
    "Embedding": Subject(embedding, words),
    "float16": Subject(half, vectors, _HALF),
    "XLA": Subject(lambda rate: perceptron(rate, jit_compile=True), vectors),
}


def resnet(*, pixels: int) -> Any:
    """Make a ResNet-50 with random weights."""
    shape = (pixels, pixels, 3)
    model = keras.applications.ResNet50(weights=None, input_shape=shape)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy"
    )
    return model


def transformer(*, length: int, width: int, layers: int) -> Any:
    """Make an encoder that predicts a word for each word.

    Args:
        length: Words of a row.
        width: Numbers of a word.
        layers: Number of layers.
    """
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width)(tokens)
    for _ in range(layers):
        attention = keras.layers.MultiHeadAttention(4, width // 4)
        x = keras.layers.LayerNormalization()(x + attention(x, x))
        wide = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(wide))
    model = keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    return model


VOCABULARY = 4096


def _compiled(layers: Any, optimizer: Any, loss: Any = "mse", **arguments: Any) -> Any:
    model = keras.Sequential(layers)
    model.compile(optimizer, loss, **arguments)
    return model
