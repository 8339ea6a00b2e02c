"""Learning rates come out scaled, once, however they were set."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import shortened, slow_on_three

import keras_dist


class Slope(keras.Model):
    """Its gradient is 1 everywhere: with plain SGD a step moves by the rate."""

    def __init__(self):
        super().__init__()
        self.position = self.add_weight(shape=(), initializer="zeros", name="position")
        self.built = True

    def call(self, x):
        return x * 0 - self.position


def slope(optimizer):
    """A compiled `Slope`."""
    model = Slope()
    model.compile(optimizer, lambda y, prediction: prediction[..., 0], run_eagerly=True)
    return model


def moves(model, world, steps=4, epochs=1, **options):
    """How far each of `epochs` × `steps` updates moves the position."""
    seen = [float(model.position)]
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(model.position))
    )
    x = np.zeros((2 * steps * world.size, 1), "float32")
    options["callbacks"] = [*options.get("callbacks", ()), watch]
    keras_dist.dist_fit(model, x, x, batch_size=2, epochs=epochs, verbose=0, **options)
    return np.diff(seen).tolist()


def rising(factor, steps):
    """Factors of a warm-up over so many steps."""
    return [1 + (factor - 1) * step / steps for step in range(steps)]


HALVES = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
SCHEDULE = keras.optimizers.schedules.PolynomialDecay(1.0, 24, end_learning_rate=0)

# The rate, arguments of `dist_fit`, and how far each step moves on so many ranks.
CASES = {
    "linear": (0.5, {"lr_scaling": "linear"}, lambda n: [0.5 * n] * 4),
    "square root": (0.5, {"lr_scaling": "sqrt"}, lambda n: [0.5 * math.sqrt(n)] * 4),
    "none": (0.5, {"lr_scaling": "none"}, lambda n: [0.5] * 4),
    "a number": (0.5, {"lr_scaling": 3.0}, lambda n: [1.5] * 4),
    "a function": (0.5, {"lr_scaling": lambda n: n / 4}, lambda n: [n / 8] * 4),
    "a warm-up, batch by batch, then flat": (
        *(1.0, {"epochs": 3, "warmup_epochs": 2}),
        lambda n: rising(n, 8) + [n] * 4,
    ),
    "the callback of a warm-up, which takes over": (
        1.0,
        {
            "epochs": 2,
            "callbacks": [keras_dist.LearningRateWarmup(1, lr_scaling="sqrt")],
        },
        lambda n: rising(math.sqrt(n), 4) + [math.sqrt(n)] * 4,
    ),
    "a schedule, which falls as fast per epoch as on one process": (
        *(SCHEDULE, {}),
        lambda n: [n * (1 - step * n / 24) for step in range(4)],
    ),
    "a schedule that is read at each step": (
        *(SCHEDULE, {"steps_scaling": "none", "lr_scaling": "none"}),
        lambda n: [1 - step / 24 for step in range(4)],
    ),
    "a rate that is halved in each epoch, and read by who halves it": (
        1.0,
        {"epochs": 2, "callbacks": [HALVES]},
        lambda n: [0.5 * n] * 4 + [0.25 * n] * 4,
    ),
}
LONG = {"square root", "a number", "a schedule that is read at each step"}


@slow_on_three
@pytest.mark.parametrize("name", shortened(CASES, CASES.keys() - LONG))
def test_an_update_is_scaled_once_and_the_rate_is_not(world, name):
    """By a rule, a warm-up, a callback; a second fit neither scales nor warms up."""
    rate, options, expected = CASES[name]
    model, expected = slope(keras.optimizers.SGD(rate)), expected(world.size)
    assert moves(model, world, **options) == pytest.approx(expected)
    if rate is not SCHEDULE:
        left = 0.25 if HALVES in options.get("callbacks", ()) else rate
        assert float(model.optimizer.learning_rate) == left
    if rate is not SCHEDULE and "callbacks" not in options:
        again = moves(model, world, **options | {"epochs": 1})
        assert again == pytest.approx(expected[-4:])


def test_the_warmup_callback_says_the_steps_of_data_of_unknown_length(world):
    """In `dist_fit` as in `model.fit`; the steps are those of each rank."""
    model = slope(keras.optimizers.SGD(1.0))
    x = tf.zeros((8 * world.size, 1))
    data = tf.data.Dataset.from_tensors((x, x)).unbatch().filter(lambda *_: True)
    warmup = keras_dist.LearningRateWarmup(2, steps_per_epoch=4)
    keras_dist.dist_fit(model, data.batch(2), callbacks=[warmup], verbose=0)
    moved = sum(1 + (world.size - 1) * step / 8 for step in range(4))
    assert float(model.position) == pytest.approx(moved)
