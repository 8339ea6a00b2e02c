"""Rows for the ways to train, and layers and steps that several of them have."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from harness.keras_ways.way import ROWS
from harness.models import Stepping, update


def floats(*shape, rows=ROWS, seed=0):
    """Normal numbers in the dtype of the models."""
    drawn = np.random.default_rng(seed).normal(size=(rows, *shape))
    return drawn.astype(keras.config.floatx())


def integers(high, *shape, low=0, seed=0):
    """Whole numbers from `low` to `high` − 1."""
    drawn = np.random.default_rng(seed).integers(low, high, size=(ROWS, *shape))
    return drawn.astype("int32")


def padded(high, width, seed=0):
    """As `integers` from 1 on, with zeros behind the end of each row."""
    x = integers(high, width, low=1, seed=seed)
    lengths = 1 + np.arange(ROWS) * 7 % width
    return np.where(np.arange(width)[None, :] < lengths[:, None], x, 0).astype("int32")


def noise_of(x, width):
    """Noise that follows from each row: as good as drawn, and the same on all ranks."""
    flat = ops.reshape(x, (ops.shape(x)[0], -1))
    return ops.sin(37.0 * flat[:, :width] + 11.0)


def perceptron(*units, inputs, **last):
    """Dense layers of so many units; `last` are arguments of the last one."""
    layers = [keras.layers.Dense(count, activation="tanh") for count in units[:-1]]
    return keras.Sequential(
        [keras.Input((inputs,)), *layers, keras.layers.Dense(units[-1], **last)]
    )


def square(x):
    """Mean of the squares of each row."""
    return ops.mean(ops.square(ops.reshape(x, (ops.shape(x)[0], -1))), axis=1)


class Tracked(Stepping):
    """Train and test steps that log a loss by a tracker, as a mean over the rows."""

    def __init__(self, name="loss"):
        super().__init__()
        self.tracker = keras.metrics.Mean(name=name)

    @property
    def metrics(self):
        return [self.tracker]

    def track(self, loss, batch):
        """The logs after a batch of this loss."""
        rows = ops.shape(keras.tree.flatten(batch)[0])[0]
        self.tracker.update_state(loss, sample_weight=rows)
        return {self.tracker.name: self.tracker.result()}

    def train_step(self, batch):
        return self.track(super().train_step(batch)["loss"], batch)

    def test_step(self, batch):
        return self.track(self.loss_of(batch), batch)


class Guided:
    """The guide's train step: sample weights, metrics, and a test step.

    A base beside `keras.Model`: Keras changes the bases of functional models.
    """

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight)
        update(tape, loss, self.optimizer, self)
        return self._logged(loss, y, y_pred, weight)

    def test_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight)
        return self._logged(loss, y, y_pred, weight)

    def _logged(self, loss, y, y_pred, weight):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(y)[0])
            else:
                metric.update_state(y, y_pred, sample_weight=weight)
        return {metric.name: metric.result() for metric in self.metrics}
