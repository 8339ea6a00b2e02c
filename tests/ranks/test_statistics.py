"""State that no gradient changes: statistics of BatchNormalization, and counters."""

from functools import partial

import keras
import numpy as np
import pytest
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    shortened,
    train_on_one_process,
)
from harness.models import make_compiled, vectors

import keras_dist
from keras_dist import mixin
from keras_dist.training.batch_norm import GlobalMoments

pytestmark = pytest.mark.several_ranks


def make_model(is_synchronized, run_eagerly=True):
    """Two normalizations, far from zero mean, in a model of masked sequences."""
    keras.utils.set_random_seed(2)
    inputs = keras.Input((4, 5))
    x = keras.layers.Masking()(inputs)
    x = keras.layers.BatchNormalization(synchronized=is_synchronized)(x)
    x = keras.layers.Dense(6, activation="tanh", bias_initializer="ones")(x)
    x = keras.layers.BatchNormalization(synchronized=is_synchronized)(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=run_eagerly)
    return model


@pytest.mark.parametrize("run_eagerly", shortened([True, False], {False}))
def test_synchronized_layers_equal_one_process(world, rows, run_eagerly):
    """Weights, moving statistics and gradients, with ragged batches and masks."""
    # The last global batch is ragged, but has at least one row for every rank.
    x, y = 10.0 + rows[0][:95], rows[1][:95]
    x = np.repeat(x[:, None], 4, axis=1) * np.arange(1, 5)[:, None]
    # Sequences of different lengths: ranks differ in what they count.
    x[np.arange(4)[None, :] > np.arange(len(x))[:, None] % 4] = 0.0
    model, *_ = assert_equals_one_process(
        lambda: make_model(True, run_eagerly),
        (x, y),
        # One rank is Keras's own, which synchronizes with less exact arithmetic.
        plain_make=lambda: make_model(world.size == 1, run_eagerly),
        epochs=2,
    )
    assert not any(mixin.has(layer, GlobalMoments) for layer in model.layers)


@pytest.mark.three_ranks
def test_moving_statistics_are_weighted_by_rows(world):
    """A rank with fewer rows counts less; frozen layers do not change by a bit."""
    keras.utils.set_random_seed(1)
    own_rows = 4 + 3 * world.rank
    x = np.full((own_rows, 2), float(world.rank), "float32")
    frozen = keras.layers.Dense(2, trainable=False)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            frozen,
            keras.layers.BatchNormalization(momentum=0.0),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", run_eagerly=True)
    before = [keras_dist.broadcast(weight) for weight in frozen.get_weights()]
    keras_dist.dist_fit(
        model, x, np.zeros(own_rows), batch_size=20, shard="none", verbose=0
    )
    own_mean = frozen(x[:1]).numpy()[0]
    by_rank = keras_dist.gather((own_rows, own_mean))
    expected = sum(count * mean for count, mean in by_rank)
    expected /= sum(count for count, _ in by_rank)
    moving_mean = model.layers[1].moving_mean.numpy()
    assert moving_mean == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for weight, old in zip(frozen.get_weights(), before, strict=True):
        assert (weight == old).all()


class Counters(keras.layers.Layer):
    """Counts rows and steps, with each rule for state without a gradient."""

    def build(self, shape):
        def add(**rule):
            return self.add_weight(initializer="zeros", trainable=False, **rule)

        self.rows = add(dtype="int64", aggregation="sum")
        self.total = add(dtype="float32", aggregation="sum")
        self.steps = add(dtype="int64", aggregation="mean")
        self.first = add(dtype="float32", aggregation="only_first_replica")
        self.built = True

    def call(self, x):
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
        self.total.assign_add(keras.ops.sum(x))
        self.steps.assign_add(1)
        self.first.assign(float(keras_dist.rank()) + 1.0)
        return x


@pytest.mark.three_ranks
def test_state_without_a_gradient_follows_its_own_rule(world):
    """`aggregation`: rows are summed over the ranks, steps are not."""
    x, y = vectors(48)
    counters = Counters()
    model = keras.Sequential([keras.Input((5,)), counters, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    before = [int(counters.rows), float(counters.total), int(counters.steps)]
    keras_dist.dist_fit(model, x, y, batch_size=8, epochs=2, verbose=0)
    assert_equal_to_the_bit(model)
    assert int(counters.rows) - before[0] == 2 * 48
    added = float(counters.total) - before[1]
    assert added == pytest.approx(2 * float(x.sum()), rel=1e-4)
    assert int(counters.steps) - before[2] == 2 * (48 // (8 * world.size))
    assert float(counters.first) == 1.0


class Renders(keras.Model):
    """Normalizes by its batch everywhere, as pix2pix does, and counts all rows."""

    def __init__(self, is_synchronized):
        super().__init__()
        self.normalize = keras.layers.BatchNormalization(synchronized=is_synchronized)
        self.counters, self.dense = Counters(), keras.layers.Dense(1)

    def call(self, x):
        return self.dense(self.counters(self.normalize(x, training=True)))


class Looks(keras.callbacks.Callback):
    """Calls the model on one rank alone."""

    def on_epoch_begin(self, epoch, logs=None):
        if keras_dist.rank() == 0:
            self.model(np.ones((3, 5)))
            self.model.predict(np.ones((3, 5)), verbose=0)


def test_an_evaluation_normalizes_and_counts_as_one_process(rows):
    """Of five batches, two ranks have three and two: no collective is in them."""
    x, y = (array[:96] for array in rows)
    few = x[:22], y[:22]

    def fit(method, is_synchronized):
        sgd = keras.optimizers.SGD(0.05)
        model = make_compiled(
            lambda: Renders(is_synchronized), sgd, "mse", run_eagerly=True
        )
        model(x[:1])
        how = {"validation_data": few, "validation_batch_size": 5, "verbose": 0}
        how |= {"epochs": 2, "shuffle": False, "callbacks": [Looks()]}
        history = method(model, x, y, batch_size=8, **how).history
        return model, history | {"rows": int(model.counters.rows)}

    expected = train_on_one_process(lambda: fit(keras.Model.fit, False)).history
    model, found = fit(partial(keras_dist.dist_fit, batch="global"), True)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-4), name
    assert_equal_to_the_bit(model)


@pytest.mark.three_ranks
def test_state_of_validation_is_synchronized_and_predicted_with():
    """Rows that a layer counts in validation, and what a callback predicts with."""
    x, y = vectors(48)
    counters, found = Counters(), []
    layers = [counters, keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile("sgd", "mse", run_eagerly=True)
    many, before = keras_dist.DistributedModel(model), int(counters.rows)

    class Predicts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(many.predict(x[:20], batch_size=4, verbose=0))

    given = {"validation_data": (x[:22], y[:22]), "verbose": 0}
    keras_dist.dist_fit(model, x, y, batch_size=8, **given)
    assert_equal_to_the_bit(model)
    assert int(counters.rows) - before == 48 + 22
    keras_dist.dist_fit(model, x, y, batch_size=8, callbacks=[Predicts()], **given)
    assert_equal_to_the_bit(model)
    predicted = 20 * len(found)
    assert found and int(counters.rows) - before == 2 * (48 + 22) + predicted
    assert len(set(map(repr, keras_dist.gather(np.concatenate(found).tolist())))) == 1
