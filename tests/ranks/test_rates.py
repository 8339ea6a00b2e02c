"""Learning rates come out scaled, once, however they were set."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import slow_on_three

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
    options.setdefault("callbacks", []).append(watch)
    keras_dist.dist_fit(model, x, x, batch_size=2, epochs=epochs, verbose=0, **options)
    return np.diff(seen).tolist()


@slow_on_three
def test_rules_scale_the_update_and_not_the_rate(world):
    """Linear, square root, none, a number, a function; the rate itself stays."""
    rules = {
        "linear": world.size,
        "sqrt": math.sqrt(world.size),
        "none": 1,
        3.0: 3,
        (lambda size: size / 4): world.size / 4,
    }
    for rule, factor in rules.items():
        model = slope(keras.optimizers.SGD(0.5))
        assert moves(model, world, lr_scaling=rule) == pytest.approx([0.5 * factor] * 4)
        assert float(model.optimizer.learning_rate) == 0.5
    # A second fit of the same model does not scale again.
    assert moves(model, world, lr_scaling=rule) == pytest.approx([0.5 * factor] * 4)


def test_warmup_rises_batch_by_batch_and_only_once(world):
    """From 1 to the full factor over the first epochs, then flat."""
    model = slope(keras.optimizers.SGD(1.0))
    rising = [1 + (world.size - 1) * step / 8 for step in range(8)]
    expected = rising + [world.size] * 4
    assert moves(model, world, epochs=3, warmup_epochs=2) == pytest.approx(expected)
    # The model has made its first steps: a second fit has no warm-up.
    again = moves(model, world, epochs=1, warmup_epochs=2)
    assert again == pytest.approx([world.size] * 4)


def test_the_warmup_callback_in_a_list_takes_over(world):
    """Given by the user, it is the one that scales, and nothing is scaled twice."""
    model = slope(keras.optimizers.SGD(1.0))
    warmup = keras_dist.LearningRateWarmup(1, lr_scaling="sqrt")
    full = math.sqrt(world.size)
    expected = [1 + (full - 1) * step / 4 for step in range(4)] + [full] * 4
    assert moves(model, world, epochs=2, callbacks=[warmup]) == pytest.approx(expected)


def test_the_warmup_callback_says_the_steps_of_data_of_unknown_length(world):
    """In `dist_fit` as in `model.fit`; the steps are those of each rank."""
    model = slope(keras.optimizers.SGD(1.0))
    x = tf.zeros((8 * world.size, 1))
    data = tf.data.Dataset.from_tensors((x, x)).unbatch().filter(lambda *_: True)
    warmup = keras_dist.LearningRateWarmup(2, steps_per_epoch=4)
    keras_dist.dist_fit(model, data.batch(2), callbacks=[warmup], verbose=0)
    moved = sum(1 + (world.size - 1) * step / 8 for step in range(4))
    assert float(model.position) == pytest.approx(moved)


def test_a_schedule_is_read_at_the_steps_of_one_process(world):
    """With the steps divided it falls as fast per epoch as on one process."""
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 24, end_learning_rate=0)
    model = slope(keras.optimizers.SGD(schedule))
    size = world.size
    expected = [size * (1 - step * size / 24) for step in range(4)]
    assert moves(model, world) == pytest.approx(expected)
    # Steps that are not divided: the schedule is read at each step.
    model = slope(keras.optimizers.SGD(schedule))
    expected = [1 - step / 24 for step in range(4)]
    options = {"steps_scaling": "none", "lr_scaling": "none"}
    assert moves(model, world, **options) == pytest.approx(expected)


def test_rates_set_during_training_are_scaled_once(world):
    """By `LearningRateScheduler`, which also reads what it has set before."""
    model = slope(keras.optimizers.SGD(1.0))
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    expected = [0.5 * world.size] * 4 + [0.25 * world.size] * 4
    assert moves(model, world, epochs=2, callbacks=[halve]) == pytest.approx(expected)
    assert float(model.optimizer.learning_rate) == 0.25
