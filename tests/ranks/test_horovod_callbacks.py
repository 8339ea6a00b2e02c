"""Callbacks and files of `keras_dist.horovod`; the oracle is Horovod's own formula."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_horovod import assert_close, assert_equal_on_all, by_hand, fit, make, rows_of

import keras_dist
import keras_dist.horovod as hvd

# On three ranks, all of them with LONG_TESTS=1, and those that are marked always.
_IS_LONG = os.environ.get("LONG_TESTS")
pytestmark = pytest.mark.three_ranks if _IS_LONG else pytest.mark.several_ranks


class Rates(keras.callbacks.Callback):
    """Records the learning rate of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        """Records it."""
        self.seen.append(float(self.model.optimizer.learning_rate))


def warmup(initial, epochs, *, steps, size):
    """Horovod's formula, for each batch of the warm-up."""
    positions = [e + (b + 1) / steps for e in range(epochs) for b in range(steps)]
    return [initial / size * (p * (size - 1) / epochs + 1) for p in positions]


@pytest.mark.parametrize("is_built", [True, False])
def test_all_ranks_start_equal_before_the_first_step(is_built):
    """From the root's weights, also where the first batch has to build the model."""
    root = hvd.size() - 1
    keras.utils.set_random_seed(3 + (hvd.rank() != root))
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([*([keras.Input((5,))] if is_built else []), *layers])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    compiled = {"run_eagerly": is_built}
    fit(model, optimizer, callbacks=[callback], compiled=compiled)
    assert_equal_on_all(model)
    assert type(model) is keras.Sequential and callback.broadcast_done
    if is_built:
        expected = make(3)
        assert_close(model, by_hand(expected, keras.optimizers.SGD(0.05, momentum=0.9)))


def test_a_plain_optimizer_is_broadcast():
    """With weights that differ before it."""
    model = make(3 + hvd.rank())
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, keras.optimizers.Adam(0.0), callbacks=[callback])
    assert_close(model, make(3), 0)


@pytest.mark.several_ranks
def test_different_models_are_an_error_before_the_broadcast():
    """The error names the number of variables."""
    layers = [keras.layers.Dense(4), keras.layers.Dense(1)][hvd.rank() and 1 :]
    model = make(layers=layers)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ValueError, match="number of variables"):
        fit(model, keras.optimizers.SGD(), callbacks=[callback])


def test_metrics_are_means_over_the_ranks():
    """Unweighted, those of validation too, for the callbacks behind."""
    rank, size = hvd.rank(), hvd.size()
    model = make()
    x, y = rows_of(rank, count=8 + 8 * rank)
    validation = rows_of(rank, count=4 + 2 * rank, step=1)
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"], run_eagerly=True)
    average = hvd.callbacks.MetricAverageCallback()
    history = model.fit(
        x, y, batch_size=64, validation_data=validation, callbacks=[average], verbose=0
    ).history
    losses, errors = [], []
    for other in range(size):
        loss, error = make_compiled(model).evaluate(
            *rows_of(other, count=4 + 2 * other, step=1), verbose=0
        )
        losses.append(loss)
        errors.append(error)
    np.testing.assert_allclose(history["val_loss"][0], np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(history["val_mae"][0], np.mean(errors), rtol=1e-5)
    assert len({found["loss"][0] for found in keras_dist.gather(history)}) == 1


def make_compiled(model):
    """A compiled copy, which this rank evaluates by itself."""
    copy = make()
    copy.set_weights(model.get_weights())
    copy.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"], run_eagerly=True)
    return copy


def test_the_rate_warms_up_and_follows_its_schedule():
    """By Horovod's formulas, at each batch; `lr` is logged."""
    size, rates = hvd.size(), Rates()
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=0.1, warmup_epochs=2, verbose=1
        ),
        hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2),
        hvd.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 1 / (epoch + 1), 3, 4, staircase=False
        ),
        rates,
    ]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    history = fit(make(), optimizer, epochs=5, callbacks=callbacks).history
    expected = warmup(0.1, 2, steps=3, size=size) + [0.1] * 3
    expected += [0.1 / (3 + b / 3 + 1) for b in range(3)] + [0.1 * 0.5**2] * 3
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-5)
    np.testing.assert_allclose(history["lr"], rates.seen[2::3], rtol=1e-6)


def test_momentum_is_corrected_for_one_batch():
    """The velocity of an update is scaled by new rate / old rate."""
    model = make()
    warm = hvd.callbacks.LearningRateWarmupCallback(0.05, 1, steps_per_epoch=3)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.9))
    fit(model, optimizer, callbacks=[warm], compiled={"run_eagerly": False})
    expected = make()
    rates = warmup(0.05, 1, steps=3, size=hvd.size())
    velocity, old = [0.0] * 4, 0.02
    for index, rate in enumerate(rates):
        rows = slice(8 * index, 8 * index + 8)
        per_rank = [
            [g.numpy() for g in own_gradients(expected, rank, rows)]
            for rank in range(hvd.size())
        ]
        mean = [sum(found) / hvd.size() for found in zip(*per_rank, strict=True)]
        momentum = 0.9 * rate / old
        velocity = [
            momentum * v - rate * g for v, g in zip(velocity, mean, strict=True)
        ]
        for variable, change in zip(
            expected.trainable_variables, velocity, strict=True
        ):
            variable.assign_add(change)
        old = rate
    assert_close(model, expected)


def own_gradients(model, rank, rows):
    """Gradients of some rows of one rank."""
    x, y = rows_of(rank)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x[rows]) - y[rows]))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


def test_an_old_argument_of_compile_is_left_out_with_a_warning():
    """`experimental_run_tf_function=False`, also by a subclass of a model."""
    model = make()
    with pytest.warns(UserWarning, match="experimental_run_tf_function") as caught:
        model.compile("sgd", "mse", experimental_run_tf_function=False)
    assert len(caught) == 1 and model.compiled
    assert caught[0].filename == __file__


def test_callback_lists_may_differ_and_one_rank_may_save_and_evaluate(tmp_path):
    """The first rank has a checkpoint and evaluates; then all resume from it."""
    file = hvd.broadcast_object(tmp_path / "checkpoint-{epoch}.h5", 0)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    model = make(3 + hvd.rank())
    compiled = {"metrics": ["mae"], "run_eagerly": True}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(str(file)))
    fit(model, optimizer, epochs=2, callbacks=callbacks, compiled=compiled)
    if hvd.rank() == 0:
        assert len(model.evaluate(*rows_of(0), verbose=0)) == 2
    epoch = hvd.broadcast(2 if hvd.rank() == 0 else 0, 0, name="resume_from_epoch")
    # As in Horovod's example for ImageNet: one rank loads, the others make a model.
    if hvd.rank() == 0:
        resumed = hvd.load_model(str(file).format(epoch=2))
        resumed.run_eagerly = True  # a file does not say it
    else:
        resumed = make(9)
        again = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        resumed.compile(again, "mse", metrics=["mae"], run_eagerly=True)
    x, y = rows_of(hvd.rank())
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 4}
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    resumed.fit(x, y, callbacks=callbacks, initial_epoch=int(epoch), **arguments)
    model.fit(x, y, initial_epoch=2, **arguments)
    assert_close(resumed, model)
    assert_equal_on_all(resumed)


@pytest.mark.parametrize("suffix", ["h5", "keras"])
def test_a_loaded_model_averages_and_keeps_its_state(suffix, tmp_path):
    """As if it had not been saved; names such as "mse" are known."""
    file = str(tmp_path / f"model.{suffix}")
    model = make()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    fit(model, optimizer, compiled={"metrics": ["mae", "mse"]})
    keras.saving.save_model(model, file)
    loaded = hvd.load_model(file, compression=hvd.Compression.none)
    assert loaded.optimizer.__class__ is keras.optimizers.Adam
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    for own, other in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())
    x, y = rows_of(hvd.rank())
    loaded.run_eagerly = True
    for trained in (loaded, model):
        trained.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_close(loaded, model)
    plain = keras.models.load_model(file, compile=False)
    assert len(plain.weights) == 4


def test_a_custom_optimizer_is_loaded(tmp_path):
    """`custom_optimizers`, and `custom_objects` for a loss."""

    class Halved(keras.optimizers.SGD):
        """An SGD of the user's."""

    def my_loss(y, prediction):
        return keras.ops.mean(keras.ops.square(y - prediction))

    file = str(tmp_path / "model.h5")
    model = make()
    fit(model, hvd.DistributedOptimizer(Halved(0.1)), compiled={"loss": my_loss})
    keras.saving.save_model(model, file)
    objects = {"my_loss": my_loss}
    loaded = hvd.load_model(file, custom_optimizers=[Halved], custom_objects=objects)
    assert isinstance(loaded.optimizer, Halved)
    loaded.run_eagerly = True
    loaded.fit(*rows_of(hvd.rank()), verbose=0)


@pytest.mark.several_ranks
def test_mixed_precision_averages_in_the_outermost_optimizer():
    """An inf on one rank is one for all; nobody waits."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = rows_of(hvd.rank())
    if hvd.rank() == 0:
        x[0] = np.inf
    scale = float(model.optimizer.initial_scale)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_equal_on_all(model)
    assert float(model.optimizer.dynamic_scale) == scale / 2
    assert int(model.optimizer.iterations) == 2
