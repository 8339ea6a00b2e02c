"""Tape, batch normalization and the best checkpoint of hvd's module."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_horovod import assert_close, by_hand, fit, make, rows_of

import keras_dist.horovod as hvd

# On three ranks, all of them with LONG_TESTS=1, and those that are marked always.
_IS_LONG = os.environ.get("LONG_TESTS")
pytestmark = pytest.mark.three_ranks if _IS_LONG else pytest.mark.several_ranks


@pytest.mark.parametrize(
    "is_graph", [pytest.param(False, marks=pytest.mark.long), True]
)
def test_a_tape_averages_and_its_gradients_are_not_averaged_twice(is_graph):
    """Summed gradients, applied by an optimizer that sums, are summed once."""
    model = make()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.02), op=hvd.Sum)
    optimizer.build(model.trainable_variables)
    x, y = rows_of(hvd.rank())

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    run = tf.function(step) if is_graph else step
    for start in range(0, 24, 8):
        run(tf.constant(x[start : start + 8]), tf.constant(y[start : start + 8]))
    assert_close(model, by_hand(make(), keras.optimizers.SGD(0.02), is_sum=True))


def test_a_tape_keeps_the_structure():
    """Of the sources, whatever it is."""
    rank, size = hvd.rank(), hvd.size()
    a, b = keras.Variable(2.0), tf.Variable(3.0)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        target = a * b * float(rank)
    found = tape.gradient(target, {"a": a, "b": b})
    assert float(found["a"]) == pytest.approx(3.0 * (size - 1) / 2)
    assert float(found["b"]) == pytest.approx(2.0 * (size - 1) / 2)
    assert float(tape.gradient(target, a)) == pytest.approx(3.0 * (size - 1) / 2)


def test_synchronized_statistics_are_those_of_all_rows():
    """Outputs and moving statistics of a `BatchNormalization` on all rows."""
    everyone = np.concatenate([rows_of(rank)[0] for rank in range(hvd.size())])
    layer, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    found = layer(rows_of(hvd.rank())[0], training=True)
    expected = plain(everyone, training=True)
    mine = expected[24 * hvd.rank() : 24 * hvd.rank() + 24]
    np.testing.assert_allclose(found, mine, rtol=1e-4, atol=1e-5)
    for own, other in zip(layer.weights, plain.weights, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-4, atol=1e-6)
    config = layer.get_config()
    assert hvd.SyncBatchNormalization.from_config(config).get_config() == config
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)


def test_a_best_checkpoint_needs_a_file(tmp_path):
    """Its `filepath` is set later."""
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="needs a file"):
        fit(make(), keras.optimizers.SGD(0.01), callbacks=[callback])
    callback.filepath = str(tmp_path / f"{hvd.rank()}.keras")
    fit(make(), keras.optimizers.SGD(0.01), callbacks=[callback])
    assert keras.models.load_model(callback.filepath).built
