"""A callback compiles the model in the middle of a fit, to thaw its layers."""

import keras
import numpy as np
import pytest
from claims import shortened

import keras_dist

pytestmark = [pytest.mark.three_ranks, pytest.mark.slow_on_three]


class Thaws(keras.callbacks.Callback):
    """Makes the first layer trainable at the second epoch."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.layers[0].trainable = True
            compile_model(self.model, self.rate, self.model.run_eagerly)
            self.model.make_train_function(force=True)


def summed(y, p):
    """A sum over rows."""
    return keras.ops.sum(keras.losses.binary_crossentropy(y, p)) / 16


def mae(y, p):
    """A mean over rows."""
    return keras.ops.mean(keras.ops.abs(y[:, None] - p))


def compile_model(model, rate, is_eager):
    """With functions of the user's if it is eager: they are tried."""
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    loss, metric = (summed, mae) if is_eager else ("binary_crossentropy", "mae")
    model.compile(optimizer, loss, metrics=[metric], run_eagerly=is_eager)


@pytest.mark.parametrize("is_eager", shortened([False, True], {True}))
@pytest.mark.parametrize("batch", shortened(["global", "rank"], {"rank"}))
def test_the_new_optimizer_averages_and_its_rate_is_scaled(
    world, rows, batch, is_eager
):
    """Weights and metrics equal one process with the global batch."""
    x, y = rows
    factor = world.size if batch == "rank" else 1
    weights, logs = [], []
    for is_ours in (False, True):
        keras.utils.set_random_seed(3)
        hidden = keras.layers.Dense(4, activation="tanh", trainable=False)
        out = keras.layers.Dense(1, activation="sigmoid")
        model = keras.Sequential([keras.Input((5,)), hidden, out])
        rate = 0.1 if is_ours else 0.1 * factor
        compile_model(model, rate, is_eager)
        options = {
            "batch_size": 16 if is_ours else 16 * factor,
            "epochs": 3,
            "shuffle": False,
            "callbacks": [Thaws(rate)],
            "validation_data": (x[:9], y[:9]),
            "verbose": 0,
        }
        if is_ours:
            history = keras_dist.dist_fit(model, x, y, batch=batch, **options)
        else:
            history = model.fit(x, y, **options)
        logs.append(history.history["mae"])
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    assert type(model.optimizer).__mro__[0] is keras.optimizers.SGD
