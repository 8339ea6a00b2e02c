"""A model that TensorFlow distributes is an error that says so."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist


def make_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def all_inside(strategy):
    with strategy.scope():
        model = make_model()
        model.compile("adam", "mse")
    return model


def unbuilt(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return model


def compiled_inside(strategy):
    model = make_model()
    with strategy.scope():
        model.compile(keras.optimizers.Adam(), "mse")
    return model


def layers_inside(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def strategy():
    """One that keeps each variable once per device, as on several GPUs."""
    return tf.distribute.MirroredStrategy(["CPU:0"])


MODELS = [all_inside, unbuilt, compiled_inside, layers_inside]


@pytest.mark.parametrize("make", MODELS)
def test_a_model_made_under_a_strategy_is_an_error(world, strategy, make):
    """The same, wherever the scope was, and also outside of it now."""
    model, rows = make(strategy), np.ones((8, 2))
    with pytest.raises(ValueError, match="already distributed by TensorFlow") as found:
        keras_dist.dist_fit(model, rows, rows[:, :1], verbose=0)
    assert "MirroredStrategy" in str(found.value)


def test_a_fit_inside_of_a_scope_is_an_error(world, strategy):
    """Though model and optimizer are plain."""
    model, rows = make_model(), np.ones((8, 2))
    model.compile("adam", "mse")
    with strategy.scope(), pytest.raises(ValueError, match="already distributed by"):
        keras_dist.dist_fit(model, rows, rows[:, :1], verbose=0)
