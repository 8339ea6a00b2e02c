"""A small model and its data, trained by two ranks or by plain Keras on one process."""

import keras
import numpy as np

import keras_dist

ROWS, BATCH, EPOCHS = 96, 8, 3


def data():
    """Rows and targets, for training and for validation."""
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    return (x[:64], y[:64]), (x[64:], y[64:])


def make_model(rate=0.05, units=8):
    """The same model at every call."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(units, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.SGD(rate),
        "mse",
        metrics=["mae"],
        run_eagerly=True,  # tracing takes longer than training
    )
    return model


def fit(model, *, is_plain=False, **kwargs):
    """Train by `dist_fit`, or by Keras with the batch of two ranks."""
    (x, y), validation_data = data()
    kwargs = {"epochs": EPOCHS, "shuffle": False, "verbose": 0} | kwargs
    kwargs |= {"validation_data": validation_data}
    if is_plain:
        return model.fit(x, y, batch_size=2 * BATCH, **kwargs)
    return keras_dist.dist_fit(
        model, x, y, batch_size=BATCH, lr_scaling="none", **kwargs
    )
