"""A callback compiles the model in the middle of a fit, to thaw its layers."""

import keras
import pytest
from harness.claims import assert_equals_one_process, shortened

pytestmark = [pytest.mark.three_ranks, pytest.mark.slow_on_three]


class Thaws(keras.callbacks.Callback):
    """Makes the first layer trainable at the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.layers[0].trainable = True
            compile_model(self.model, self.model.rate, self.model.run_eagerly)
            self.model.make_train_function(force=True)

    def on_train_end(self, logs=None):
        self.model.optimizer.learning_rate = 0.1  # as that of the ranks


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

    def make(rate):
        keras.utils.set_random_seed(3)
        hidden = keras.layers.Dense(4, activation="tanh", trainable=False)
        out = keras.layers.Dense(1, activation="sigmoid")
        model = keras.Sequential([keras.Input((5,)), hidden, out])
        model.rate = rate
        compile_model(model, rate, is_eager)
        return model

    factor, rule = (world.size, "linear") if batch == "rank" else (1, "none")
    given = {"options": {"lr_scaling": rule}, "callbacks": [Thaws()], "epochs": 3}
    given |= {"plain_make": lambda: make(0.1 * factor), "logs": ["mae"]}
    given |= {"batch": batch, "validation_data": (x[:9], y[:9])}
    model, *_ = assert_equals_one_process(lambda: make(0.1), rows, 16, **given)
    assert type(model.optimizer).__mro__[0] is keras.optimizers.SGD
