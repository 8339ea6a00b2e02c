"""A small model, trained by two ranks or, after the word "plain", by plain Keras."""

import sys

import keras
import numpy as np

import keras_dist


def train(callbacks=()):
    """Train for three epochs with validation; Keras with the batch of two ranks."""
    keras.utils.set_random_seed(7)
    hidden = keras.layers.Dense(8, activation="tanh")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    # Eagerly, since tracing takes longer than training.
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], run_eagerly=True)
    x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    given = {"epochs": 3, "shuffle": False, "verbose": 0, "callbacks": [*callbacks]}
    given |= {"validation_data": (x[64:], y[64:])}
    if sys.argv[2:] == ["plain"]:
        model.fit(x[:64], y[:64], batch_size=16, **given)
    else:
        given |= {"batch_size": 8, "lr_scaling": "none"}
        keras_dist.dist_fit(model, x[:64], y[:64], **given)
