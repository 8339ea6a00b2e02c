"""N ranks give the weights, metrics and state of one process with the global batch."""

import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    read_by_keras,
)
from harness.models import Repeated, in_precision, make_compiled, perceptron, unbuilt

import keras_dist


@pytest.mark.three_ranks
@pytest.mark.parametrize(
    "is_jitted",
    # With XLA also in test_cases, test_sums and test_xla.
    [False, pytest.param(True, marks=[pytest.mark.several_ranks, pytest.mark.long])],
)
def test_training_equals_one_process(world, rows, make_model, is_jitted):
    """Weights, optimizer state and every metric, over ragged epochs."""
    compiled = {"jit_compile": is_jitted, "run_eagerly": False}
    # XLA takes seconds to compile an AUC, on every rank and for each size of a batch.
    compiled["metrics"] = ["accuracy", "mae" if is_jitted else "auc"]

    def make():
        # Other initial weights on the other ranks: only the first rank's may count.
        sgd = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
        return make_model(sgd, seed=3 + world.rank, **compiled)

    given = {"epochs": 2, "validation_data": tuple(array[:57] for array in rows)}
    how = {"factor": world.size, "options": {"lr_scaling": "linear"}}
    model, logs, oracle = assert_equals_one_process(make, rows, **how, **given)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    assert logs.keys() == {*oracle.history, "rows_per_second"}
    assert min(logs["rows_per_second"]) > 0
    assert len(set(map(str, keras_dist.gather(logs)))) == 1


@pytest.mark.several_ranks
def test_every_initial_weight_is_the_first_ranks(world, rows):
    """No step is made from different weights, also where Keras builds late."""
    for make, is_eager in ((Repeated, False), (unbuilt, True), (perceptron, False)):
        how = {"run_eagerly": is_eager, "jit_compile": False}
        model = make_compiled(make, "adam", "mse", seed=world.rank, **how)
        keras_dist.dist_fit(model, *rows, batch_size=40, verbose=0)
        assert_equal_to_the_bit(model)
        assert int(model.optimizer.iterations) == -(-101 // (40 * world.size))


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
    options |= {"batch_size": 12, "batch": "global", "epochs": 2, "verbose": 0}
    keras_dist.dist_fit(model, x, x, **options)
    steps = zip(*keras_dist.gather(list(model.seen)), strict=True)
    return [list(itertools.chain(*own)) for own in steps]


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


@pytest.mark.three_ranks
@pytest.mark.parametrize("by", ["dist_fit", "fit", "train_on_batch"])
def test_mixed_precision_skips_on_all_ranks(world, rows, by):
    """An inf on one rank only: all ranks skip the update and halve the scale."""
    x, y = rows
    x, y = np.array(x[:96]), y[:96]
    model = in_precision("mixed_float16")
    inner = keras.optimizers.SGD(0.01)
    if by != "dist_fit":
        inner = keras_dist.DistributedOptimizer(inner)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    model.compile(optimizer, "mse", jit_compile=False)
    x[-1] = np.inf  # the last row belongs to the last rank
    arguments = {"batch_size": 96 // world.size, "epochs": 3, "shuffle": False}
    own = x[world.rank :: world.size], y[world.rank :: world.size]
    if by == "dist_fit":
        keras_dist.dist_fit(model, x, y, verbose=0, **arguments)
    elif by == "fit":
        callbacks = [keras_dist.BroadcastVariables()]
        model.fit(*own, verbose=0, callbacks=callbacks, **arguments)
    else:
        for _ in range(3):
            model.train_on_batch(*own)
    assert_equal_to_the_bit(model)
    assert float(optimizer.dynamic_scale) == 1024.0 / 8
    assert int(inner.iterations) == 0
