"""Fits in two threads of one process do not disturb each other."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import keras_dist
from keras_dist import mixin


def doubled(plain, loss, *args, **kwargs):
    """In place of `keras.losses.Loss.__call__`."""
    return 2 * plain(*args, **kwargs)


def test_a_method_is_replaced_in_one_thread_alone():
    """Whichever of two steps ends first, and with the class's own method afterwards."""
    loss = keras.losses.MeanSquaredError()
    plain = vars(keras.losses.Loss)["__call__"]
    ones, zeros = ops.ones((2, 1)), ops.zeros((2, 1))
    method = keras.losses.Loss, "__call__", doubled
    begun, may_end, seen = threading.Event(), threading.Event(), []

    def other():
        with mixin.replace_method(*method):
            begun.set()
            assert may_end.wait(60)
            seen.append(float(loss(ones, zeros)))

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(60)
    assert float(loss(ones, zeros)) == 1.0  # this thread's own
    with mixin.replace_method(*method):
        assert float(loss(ones, zeros)) == 2.0
    may_end.set()
    thread.join()
    assert seen == [2.0]
    assert vars(keras.losses.Loss)["__call__"] is plain


@pytest.mark.several_ranks
def test_a_plain_fit_in_another_thread_is_keras_own(world):
    """While this one traces and trains, its sums are not taken for those of all."""

    def make(reduction):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model.compile(keras.optimizers.SGD(1e-3), loss, run_eagerly=True)
        return model

    x = np.random.default_rng(1).normal(size=(64, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    expected = make("sum")
    expected.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    other, model = make("sum"), make("sum")

    def train():
        # A rank's own fit: it has no collective.
        other.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)

    thread = threading.Thread(target=train)
    thread.start()
    keras_dist.dist_fit(model, x, y, batch_size=8, epochs=3, verbose=0)
    thread.join()
    for own, one in zip(other.weights, expected.weights, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-6)
    assert tf.executing_eagerly()
