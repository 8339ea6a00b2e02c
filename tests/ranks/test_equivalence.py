"""N ranks give the weights, metrics and state of one process with the global batch."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import assert_equal_to_the_bit, largest_difference, read_by_keras

import keras_dist

OPTIMIZERS = {
    "sgd": lambda rate: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
    "adamw": lambda rate: keras.optimizers.AdamW(
        rate / 10, weight_decay=0.01, clipnorm=0.05
    ),
}


def usable(rows, world, batch_size):
    """One process's rows without those that no rank can take at the tail."""
    x, y = rows
    tail = len(x) % (batch_size * world.size)
    used = len(x) - (tail if tail < world.size else 0)
    return x[:used], y[:used]


@pytest.mark.parametrize(
    ("name", "is_jitted"),
    [
        pytest.param("sgd", False, marks=pytest.mark.three_ranks),
        pytest.param(
            *("adamw", False), marks=[pytest.mark.several_ranks, pytest.mark.long]
        ),
        pytest.param(
            "sgd",
            True,
            # Also in test_cases, test_sums and test_xla.
            marks=[
                pytest.mark.several_ranks,
                pytest.mark.three_ranks,
                pytest.mark.long,
            ],
        ),
    ],
)
def test_training_equals_one_process(world, rows, make_model, name, is_jitted):
    """Weights, optimizer state and every metric, over ragged epochs."""
    x, y = rows
    arguments = {"epochs": 2, "shuffle": False, "verbose": 0}
    arguments["validation_data"] = (x[:57], y[:57])
    compiled = {"jit_compile": is_jitted, "run_eagerly": False}
    # XLA takes seconds to compile an AUC, on every rank and for each size of a batch.
    compiled["metrics"] = ["accuracy", "mae" if is_jitted else "auc"]
    oracle = make_model(OPTIMIZERS[name](0.1 * world.size), **compiled)
    expected = oracle.fit(
        *usable(rows, world, 8), batch_size=8 * world.size, **arguments
    )
    # Other initial weights on the other ranks: only the first rank's may count.
    model = make_model(OPTIMIZERS[name](0.1), seed=3 + world.rank, **compiled)
    history = keras_dist.dist_fit(model, x, y, batch_size=8, **arguments)
    # Adam divides by a small second moment, which amplifies rounding errors.
    assert largest_difference_of_rates(model, oracle, world) < 1e-5
    assert_equal_to_the_bit(model)
    assert history.history.keys() == {*expected.history, "rows_per_second"}
    for metric, values in expected.history.items():
        assert history.history[metric] == pytest.approx(values, abs=2e-6), metric
    assert len(set(map(str, keras_dist.gather(history.history)))) == 1


def largest_difference_of_rates(model, oracle, world):
    """Compare two models of which the oracle's rate was multiplied by hand."""
    rate = float(model.optimizer.learning_rate)
    assert float(oracle.optimizer.learning_rate) == pytest.approx(rate * world.size)
    oracle.optimizer.learning_rate = rate
    return largest_difference(model, oracle)


@pytest.mark.several_ranks
def test_every_initial_weight_is_the_first_ranks(world, rows, make_model):
    """No step is made from different weights, also where Keras builds late."""
    x, y = rows
    seen = []

    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(3)
            self.outer = keras.layers.Dense(1, activation="sigmoid")

        def call(self, x):
            return self.outer(self.inner(x))

    keras.utils.set_random_seed(world.rank)
    late = Late()
    unbuilt = keras.Sequential([keras.layers.Dense(1, activation="sigmoid")])
    for model in (late, unbuilt, make_model(seed=world.rank)):
        if model is not unbuilt:
            model.compile("adam", "binary_crossentropy", jit_compile=False)
        else:
            model.compile("adam", "mse", run_eagerly=True)
        keras_dist.dist_fit(model, x, y, batch_size=40, epochs=1, verbose=0)
        assert_equal_to_the_bit(model)
        seen.append(model.optimizer.iterations.numpy())
    steps = -(-101 // (40 * world.size))
    assert seen == [steps] * 3


class Watch(keras.Model):
    """Keeps the rows that each step reads."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.compile("sgd", "mse", run_eagerly=True)

    def build(self, shape):
        self.weight = self.add_weight(shape=())
        self.built = True

    def call(self, x):
        return x * self.weight

    def train_step(self, data):
        self.seen.append(data[0].numpy().ravel().tolist())
        return super().train_step(data)


def batches_of_all(world, **options):
    """The global batches of a fit on 20 rows, in the order of the rows."""
    x, model = np.arange(20, dtype="float32")[:, None], Watch()
    keras_dist.dist_fit(
        model, x, x, batch_size=12, batch="global", epochs=2, verbose=0, **options
    )
    batches = []
    for own in zip(*keras_dist.gather(list(model.seen)), strict=True):
        batch = [None] * sum(map(len, own))
        for rank, rows in enumerate(own):
            batch[rank :: world.size] = rows
        batches.append(batch)
    return batches


@pytest.fixture
def is_untried(monkeypatch):
    """A trial of the step on its first batch would call it on parts of it, too."""
    monkeypatch.setenv("KERAS_DIST_TRIAL", "0")


@pytest.mark.three_ranks
@pytest.mark.usefixtures("is_untried")
@pytest.mark.parametrize(
    "shuffle", [True, pytest.param("batch", marks=pytest.mark.long)]
)
def test_rows_are_shuffled_as_on_one_process(world, shuffle):
    """With the script's seed, in Keras's own order, in each fit."""
    expected = read_by_keras(20, 5, shuffle=shuffle, batch_size=12, epochs=2)
    for _ in range(2):
        found = batches_of_all(world, shuffle=shuffle)
        assert found == [batch.tolist() for batch in expected]


@pytest.mark.three_ranks
@pytest.mark.usefixtures("is_untried")
def test_without_a_seed_each_epoch_has_another_order(world):
    """The same for every size: what three ranks see is what two see."""
    tf.random.set_seed(None)
    random.seed(5)
    batches = batches_of_all(world)
    orders = [sum(batches[:2], []), sum(batches[2:], [])]
    assert orders[0] != orders[1]
    assert all(sorted(order) == list(range(20)) for order in orders)
    if world.size > 1:
        seed = random.Random(5).getrandbits(31)
        expected = tf.random.experimental.stateless_shuffle(
            tf.range(20, dtype=tf.int64), [seed, 0]
        )
        assert orders[0] == expected.numpy().tolist()


@pytest.mark.several_ranks
def test_weights_of_rows_and_classes_mean_the_same(world, rows, make_model):
    """`sample_weight`, `class_weight` and `validation_split` as on one process."""
    x, y = usable(rows, world, 8)
    weight = np.linspace(0.1, 2, len(x)).astype("float32")
    common = {"epochs": 2, "shuffle": False, "verbose": 0, "validation_split": 0.2}
    for extra in (
        {"sample_weight": weight},
        {"class_weight": {1: 2.0}},  # Keras takes this for arrays only
    ):
        oracle = make_model(weighted_metrics=["mse"])
        # 80 rows stay for training: no tail on 1 rank, one without loss on 2 and 3.
        rows_left = 96 if world.size == 3 else 100
        cut = {
            key: value[:rows_left] if key == "sample_weight" else value
            for key, value in extra.items()
        }
        expected = oracle.fit(
            x[:rows_left], y[:rows_left], batch_size=8 * world.size, **common, **cut
        )
        model = make_model(weighted_metrics=["mse"])
        history = keras_dist.dist_fit(
            model,
            x[:rows_left],
            y[:rows_left],
            batch_size=8,
            lr_scaling="none",
            **common,
            **cut,
        )
        assert largest_difference(model, oracle) < 1e-5
        for metric, values in expected.history.items():
            assert history.history[metric] == pytest.approx(values, abs=2e-6), metric


@pytest.mark.several_ranks
def test_moving_statistics_are_the_same_on_all_ranks(world, rows):
    """BatchNormalization evaluates and saves one model, not one a rank."""
    x, y = rows
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    compiled = {"metrics": ["accuracy"], "jit_compile": False}
    model.compile("adam", "binary_crossentropy", **compiled)
    history = keras_dist.dist_fit(
        model, x, y, batch_size=8, epochs=2, validation_data=rows, verbose=0
    )
    assert_equal_to_the_bit(model)
    # What was validated is the model that is left.
    loss, accuracy = model.evaluate(x, y, verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(loss, abs=1e-6)
    assert history.history["val_accuracy"][-1] == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.several_ranks
@pytest.mark.three_ranks
def test_each_rank_draws_its_own_dropout_masks(world, rows):
    """Random states differ between the ranks, and one seed makes them again."""
    x, y = rows

    def states():
        keras.utils.set_random_seed(11)
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=False)
        keras_dist.dist_fit(model, x, y, batch_size=40, epochs=1, verbose=0)
        state = [v for v in model.variables if v.name == "seed_generator_state"]
        return keras_dist.gather(state[0].numpy().tolist())

    first, again = states(), states()
    assert first == again
    assert len({tuple(state) for state in first}) == world.size


@pytest.mark.three_ranks
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_mixed_precision_skips_on_all_ranks(world, rows, is_wrapped):
    """An inf on one rank only: all ranks skip the update and halve the scale."""
    x, y = rows
    x, y = np.array(x[:96]), y[:96]
    keras.utils.set_random_seed(1)
    policy = keras.mixed_precision.DTypePolicy("mixed_float16")
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(1, dtype=policy)(inputs)
    model = keras.Model(inputs, outputs)
    inner = keras.optimizers.SGD(0.01)
    if is_wrapped:
        inner = keras_dist.DistributedOptimizer(inner)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    model.compile(optimizer, "mse", jit_compile=False)
    x[-1] = np.inf  # the last row belongs to the last rank
    arguments = {"batch_size": 96 // world.size, "epochs": 3, "shuffle": False}
    if is_wrapped:
        x, y = x[world.rank :: world.size], y[world.rank :: world.size]
        callbacks = [keras_dist.BroadcastVariables()]
        model.fit(x, y, verbose=0, callbacks=callbacks, **arguments)
    else:
        keras_dist.dist_fit(model, x, y, verbose=0, **arguments)
    assert_equal_to_the_bit(model)
    assert float(optimizer.dynamic_scale) == 1024.0 / 8
    assert int(inner.iterations) == 0
