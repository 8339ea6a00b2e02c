"""Tape, local layers, process sets, batch normalization and state of hvd's module."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_horovod import assert_close, assert_equal_on_all, by_hand, fit, make, rows_of

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


def test_a_tape_keeps_the_structure_and_local_sources():
    """Local gradients are divided by the number of ranks, unless asked otherwise."""
    rank, size = hvd.rank(), hvd.size()
    a, b = keras.Variable(2.0), tf.Variable(3.0)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        target = a * b * float(rank)
    tape.register_local_source(b)
    found = tape.gradient(target, {"a": a, "b": b})
    assert float(found["a"]) == pytest.approx(3.0 * (size - 1) / 2)
    assert float(found["b"]) == pytest.approx(2.0 * rank / size)
    assert float(tape.gradient(target, a)) == pytest.approx(3.0 * (size - 1) / 2)
    local, shared = tape.get_local_and_global_gradients(target, [a, b])
    assert [pair[0] is b for pair in local] == [True] and shared[0][0] is a
    with tf.GradientTape() as plain:
        target = tf.square(b) * float(rank)
    kept = hvd.PartialDistributedGradientTape(plain, scale_local_gradients=False)
    kept.register_local_source(b)
    assert float(kept.gradient(target, b)) == 6.0 * rank


@pytest.mark.parametrize(
    "is_scaled", [True, pytest.param(False, marks=pytest.mark.long)]
)
def test_gradients_of_local_layers_are_each_ranks_own(is_scaled):
    """Divided by the number of ranks, unless asked otherwise; the others are means."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1),
        local_layers=layers[0],
        scale_local_gradients=is_scaled,
    )
    model = make(layers=layers)
    expected = make()
    fit(model, optimizer, batch=24)
    per_rank = []
    for rank in range(hvd.size()):
        x, y = rows_of(rank)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(expected(x) - y))
        variables = [v.value for v in expected.trainable_variables]
        per_rank.append(tape.gradient(loss, variables))
    own, size = per_rank[hvd.rank()], hvd.size()
    mean = [sum(found) / size for found in zip(*per_rank, strict=True)]
    local = [gradient / (size if is_scaled else 1) for gradient in own]
    applied = [*local[:2], *mean[2:]]
    keras.optimizers.SGD(0.1).apply(applied, expected.trainable_variables)
    assert_close(model, expected)
    with pytest.raises(ValueError, match="local_layers"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=["one"])


def test_a_local_variable_is_registered_with_passes():
    """`register_local_var`, with the gradients of two batches."""
    weights = [keras.Variable(0.0), keras.Variable(0.0)]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2
    )
    optimizer.register_local_var(weights[0])
    for _ in range(2):
        gradient = tf.constant(float(hvd.rank()))
        optimizer.apply([gradient, gradient], weights)
    assert float(weights[0]) == pytest.approx(-2 * hvd.rank() / hvd.size())
    assert float(weights[1]) == pytest.approx(-(hvd.size() - 1))


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


def test_state_is_committed_restored_and_synchronized():
    """Weights, optimizer and values."""
    rank = hvd.rank()
    model = make(3 + rank)
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    state = hvd.elastic.KerasState(model, batch=20 + rank, epoch=10 + rank)
    state.sync()
    assert_close(model, make(3), 0)
    assert (state.batch, state.epoch) == (20, 10)
    model.set_weights(make(7).get_weights())
    state.batch, state.epoch = 21, 11
    state.restore()
    assert_close(model, make(3), 0)
    assert (state.batch, state.epoch) == (20, 10)
    model.set_weights(make(7).get_weights())
    state.batch, state.epoch = 21, 11
    state.commit()
    state.restore()
    assert_close(model, make(7), 0)
    assert (state.batch, state.epoch) == (21, 11)


def test_a_function_begins_with_the_state_of_the_first_rank():
    """`elastic.run` with the three callbacks."""
    model = make(3 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", run_eagerly=True)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    commits = []
    own = state.commit
    state.commit = lambda: (commits.append(state.batch), own())

    @hvd.elastic.run
    def train(state, epochs):
        x, y = rows_of(hvd.rank())
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        model.fit(x, y, batch_size=8, epochs=epochs, callbacks=callbacks, verbose=0)
        return "done"

    state.register_reset_callbacks([lambda: commits.append("reset")])
    assert train(state, epochs=2) == "done"
    assert (state.epoch, state.batch) == (2, 0)
    assert commits == [1, 0, 0, 2, 0] or commits == [1, 0, 1, 0]
    assert_equal_on_all(model)
    state.on_reset()
    assert commits[-1] == "reset"


def test_a_best_checkpoint_needs_a_file(tmp_path):
    """Its `filepath` is set later."""
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="needs a file"):
        fit(make(), keras.optimizers.SGD(0.01), callbacks=[callback])
    callback.filepath = str(tmp_path / f"{hvd.rank()}.keras")
    fit(make(), keras.optimizers.SGD(0.01), callbacks=[callback])
    assert keras.models.load_model(callback.filepath).built
