"""Metrics and state that several ranks do not add up to are named, with numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import shortened, slow_on_three, warned
from keras import ops

import keras_dist

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(3, 5, size=(40, 4))
Y = RANDOM.random((40, 1))


def dice(y, p):
    """A metric of the whole batch."""
    return 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p))


def mean_error(y, p):
    """A mean over rows, as one number."""
    return ops.mean(ops.abs(y - p))


class PerBatch(keras.metrics.Metric):
    """Divides a sum by the number of batches."""

    def __init__(self):
        super().__init__(name="per_batch")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)))
        self.batches.assign_add(1.0)

    def result(self):
        return self.total / self.batches


class Merges(PerBatch):
    """The same, which says how its states are combined."""

    def merge_states(self, states):
        """As one process: the ranks have parts of each batch."""
        self.total.assign(sum(state[0] for state in states))
        self.batches.assign(states[0][1])


class Standardize(keras.layers.Layer):
    """Standardizes by all rows so far."""

    def __init__(self, aggregation="none"):
        super().__init__(name="standardize")
        self.aggregation = aggregation

    def build(self, shape):
        """Count and sum of rows."""
        zeros = {"shape": shape[1:], "initializer": "zeros", "trainable": False}
        added = zeros | {"aggregation": self.aggregation}
        self.count = self.add_weight(name="count", **added)
        self.sum = self.add_weight(name="sum", **added)
        self.average = self.add_weight(name="average", **zeros)
        number = zeros | {"shape": (), "dtype": "int32"}
        self.steps = self.add_weight(name="steps", **number)

    def call(self, x, training=False):
        """The rows, unchanged: the gradients are a mean's."""
        if training:
            self.count.assign_add(ops.sum(ops.ones_like(x), axis=0))
            self.sum.assign_add(ops.sum(x, axis=0))
            self.steps.assign_add(1)
            self.average.assign(0.9 * self.average + 0.1 * ops.mean(x, axis=0))
        return x


class Counts(keras.layers.Layer):
    """Changes variables that the model does not keep."""

    def __init__(self):
        super().__init__(name="counts")
        self.held = tf.Variable(0.0, dtype="float64")
        self.queue = tf.Variable(tf.zeros([2]))

    def call(self, x):
        self.held.assign_add(1.0)
        self.queue[1:].assign([5.0])
        self.queue.scatter_nd_add([[0]], [1.0])
        return x


def messages_of(middle=(), metrics=(), **compiled):
    """The warnings of a fit about what was tried; and the model."""
    model = keras.Sequential(
        [keras.Input((4,)), *middle, keras.layers.Dense(1, activation="sigmoid")]
    )
    model.compile("sgd", "mse", metrics=list(metrics), **compiled)
    with warned("was tried") as texts:
        keras_dist.dist_fit(model, X, Y, batch_size=16, batch="global", verbose=0)
    return texts, model


@pytest.mark.three_ranks
@pytest.mark.parametrize("how", shortened([{}, {"run_eagerly": True}], [{}]))
def test_what_does_not_add_up_is_said_once(world, how):
    """With the value of the batch, and the value of its parts."""
    metrics = [dice, mean_error, PerBatch(), "mae", keras.metrics.AUC(name="auc")]
    messages, _ = messages_of([Standardize()], metrics, **how)
    assert len(messages) == (world.rank == 0), messages
    for message in messages:
        for name in ("dice (0.", "per_batch (", "standardize/count (", "/sum ("):
            assert name in message, message
        for name in ("mean_error", "mae", "auc", "/steps", "/average"):
            assert name not in message, message
        rows = len(range(16)[:: world.size])
        assert f"standardize/count ({rows} from the batch, " in message


def test_functions_of_keras_that_compare_rows_are_said(world):
    """They have no value for each row."""
    correlation = keras.metrics.PearsonCorrelation(axis=0)
    cosine = keras.metrics.CosineSimilarity(axis=0)
    metrics = [keras.losses.dice, keras.losses.Tversky(), correlation, cosine]
    messages, _ = messages_of(metrics=metrics)
    assert len(messages) == (world.rank == 0), messages
    for message in messages:
        for name in ("dice (0.", "tversky (0.", "pearson_correlation (", "cosine_"):
            assert name in message, message


@slow_on_three
def test_what_says_how_it_is_combined_is_not(world):
    """By `merge_states`, or by the `aggregation` of its weights."""
    messages, _ = messages_of([Standardize("sum")], [Merges()])
    assert not messages


def test_a_variable_outside_of_the_model_is_named(world):
    """Each rank has its own value of it."""
    messages, model = messages_of([Counts()])
    assert len(messages) == (world.rank == 0), messages
    assert all("counts.held" in text and "counts.queue" in text for text in messages)
    layer = model.get_layer("counts")
    assert float(layer.held) == 3 and layer.queue.numpy().tolist() == [3, 5]


def test_random_steps_are_not_blamed(world):
    """Two runs of the same batch differ, too; but for numbers that the parts share."""

    class Noise(keras.layers.Layer):
        def __init__(self, draw):
            super().__init__()
            self.draw = draw

        def call(self, x):
            return x + self.draw(x)

    messages, _ = messages_of([Noise(tf.random.shuffle)], [PerBatch()])
    assert not [text for text in messages if "per_batch" in text]
    shared = Noise(lambda x: tf.random.normal(ops.shape(x), dtype="float64"))
    for layer in shared, keras.layers.GaussianNoise(1.0):
        messages, _ = messages_of([layer], [PerBatch()])
        assert len(messages) == (world.rank == 0)
