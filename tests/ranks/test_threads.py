"""Fits in two threads of one process do not disturb each other."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist


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
