"""Logs of custom steps: exact and equal on all ranks, whatever their structure."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import distribute_jobs

import keras_dist

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]


class OwnSteps(keras.Model):
    """Custom steps that return logs by `logs_of(model, loss)`."""

    def __init__(self, logs_of):
        super().__init__()
        self.layer = keras.layers.Dense(1, activation="sigmoid")
        self.logs_of = logs_of
        self.tracker = keras.metrics.Mean(name="other_name")
        self.first, self.second = (keras.metrics.Mean(name="same") for _ in range(2))

    def call(self, x):
        return self.layer(x)

    def update(self, y, prediction, loss):
        self.tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        self.first.update_state(y)
        self.second.update_state(prediction)
        for metric in self.metrics:
            if metric.name == "compile_metrics":
                metric.update_state(y, prediction)
        return self.logs_of(self, loss)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x)
            loss = keras.ops.mean(keras.ops.square(prediction - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.update(y, prediction, loss)

    def test_step(self, data):
        x, y = data
        prediction = self(x)
        loss = keras.ops.mean(keras.ops.square(prediction - y))
        return self.update(y, prediction, loss)


def guide_to_train_steps(model, loss):
    """As many examples do: a dict of the compiled metrics inside of the logs."""
    return {metric.name: metric.result() for metric in model.metrics}


def deep(model, loss):
    """Dicts in dicts, other names, two metrics of one name, a vector, a batch's own."""
    return {
        "another": model.tracker.result(),
        "gan": {
            "of_first": {"x": model.first.result()},
            "of_second": {"y": model.second.result(), "batch": {"loss": loss}},
        },
        "vector": keras.ops.stack([loss, loss]),
    }


def trained(fit, logs_of, batch_size, **arguments):
    generator = np.random.default_rng(2)
    x = generator.normal(size=(50, 3))
    y = (x.sum(axis=1, keepdims=True) > 0).astype("float64")
    keras.utils.set_random_seed(4)
    model = OwnSteps(logs_of)
    model(x[:1])
    metrics = ["mae", keras.metrics.AUC(name="auc")]
    model.compile(keras.optimizers.SGD(0.5), metrics=metrics, run_eagerly=True)
    return fit(
        model,
        x,
        y,
        validation_data=(x[:23], y[:23]),
        batch_size=batch_size,
        validation_batch_size=batch_size,
        shuffle=False,
        epochs=2,
        verbose=0,
        **arguments,
    ).history


@pytest.mark.parametrize("logs_of", [guide_to_train_steps, deep])
def test_logs_of_steps_equal_one_process(world, logs_of):
    """All values, also in dicts and lists inside, are those of all rows."""
    [expected] = distribute_jobs(
        [lambda: trained(keras.Model.fit, logs_of, 4 * world.size)]
    )
    arguments = {"lr_scaling": "none"}
    history = trained(keras_dist.dist_fit, logs_of, 4, **arguments)
    history.pop("rows_per_second")
    assert set(history) == set(expected)
    for name, values in expected.items():
        flat = [keras.tree.flatten(value) for value in values]
        own = [keras.tree.flatten(value) for value in history[name]]
        np.testing.assert_allclose(
            np.concatenate([np.ravel(v) for v in own]),
            np.concatenate([np.ravel(v) for v in flat]),
            atol=1e-10,
            err_msg=name,
        )
    assert len(set(map(repr, keras_dist.gather(history)))) == 1
