"""Every way to train a Keras model equals one process."""

import keras
import pytest
import tensorflow as tf
from claims import assert_equal_to_the_bit, largest_difference

import keras_dist

pytestmark = pytest.mark.several_ranks

ARGUMENTS = {"epochs": 2, "shuffle": False, "verbose": 0}


def both(make, rows, world, batch_size=8, compiled=None):
    """The same model trained on one process and on all ranks."""
    x, y = (array[:96] for array in rows)
    models = []
    for fit, rate, size in (
        (keras.Model.fit, 0.05 * world.size, batch_size * world.size),
        (keras_dist.dist_fit, 0.05, batch_size),
    ):
        keras.utils.set_random_seed(6)
        model = make()
        model.compile(keras.optimizers.SGD(rate, momentum=0.5), **(compiled or {}))
        fit(model, x, y, batch_size=size, **ARGUMENTS)
        model.optimizer.learning_rate = 0.05
        models.append(model)
    return models


def assert_equal(models):
    """The claim of this file."""
    assert largest_difference(*models) < 1e-5
    assert_equal_to_the_bit(models[1])


def test_several_steps_in_one_execution_with_a_tail(world, rows):
    """Collectives inside Keras's own loop in the graph."""

    def make():
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

    compiled = {"loss": "mse", "steps_per_execution": 4}
    models = both(make, rows, world, batch_size=7, compiled=compiled)
    steps = -(-96 // (7 * world.size)) * 2
    assert int(models[1].optimizer.iterations) == steps
    assert (steps // 2) % 4, "a tail is what this is about"
    assert_equal(models)


def test_a_custom_loss_and_a_variable_that_nothing_reaches(world, rows):
    """`compute_loss` and `add_loss`; the unused weight is kept on all ranks."""

    class Custom(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.spare = self.add_weight(shape=(2,), name="spare")

        def call(self, x):
            self.add_loss(0.01 * keras.ops.mean(x * self.dense(x)))
            return self.dense(x)

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            loss = keras.ops.mean(keras.ops.abs(y - y_pred[:, 0]))
            return loss + sum(self.losses)

    models = both(Custom, rows, world, compiled={"run_eagerly": True})
    assert_equal(models)


def test_repeated_layer_names_in_a_subclassed_model(world, rows):
    """Collectives are named by place, and not by Keras's names."""

    class Repeated(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(5, name="dense")
            self.second = keras.layers.Dense(1, name="dense")

        def call(self, x):
            return self.second(self.first(x))

    if world.rank == 0:
        keras.layers.Dense(1)  # another number in automatic names on one rank
    assert_equal(both(Repeated, rows, world, compiled={"loss": "mse"}))


def test_layers_unfrozen_between_two_fits(world, rows):
    """What is frozen stays to the bit, and trains when it is not any more."""
    x, y = (array[:96] for array in rows)
    models = []
    for fit, rate, size in (
        (keras.Model.fit, 0.05 * world.size, 8 * world.size),
        (keras_dist.dist_fit, 0.05, 8),
    ):
        keras.utils.set_random_seed(6)
        first = keras.layers.Dense(4, trainable=False)
        model = keras.Sequential([keras.Input((5,)), first, keras.layers.Dense(1)])
        before = first.get_weights()[0]
        for is_trainable in (False, True):
            first.trainable = is_trainable
            model.compile(keras.optimizers.SGD(rate), "mse", run_eagerly=True)
            fit(model, x, y, batch_size=size, **ARGUMENTS)
            assert (first.get_weights()[0] == before).all() == (not is_trainable)
        model.optimizer.learning_rate = 0.05
        models.append(model)
    assert_equal(models)


def test_batches_one_by_one(world, rows):
    """`train_on_batch` with an optimizer that averages."""
    x, y = (array[:96] for array in rows)
    models = []
    for wrap, part in (
        (lambda optimizer: optimizer, slice(None)),
        (keras_dist.DistributedOptimizer, slice(world.rank, None, world.size)),
    ):
        keras.utils.set_random_seed(6)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(wrap(keras.optimizers.Adam(0.01)), "mse", run_eagerly=True)
        for step in range(4):
            batch = slice(step * 24, (step + 1) * 24)
            model.train_on_batch(x[batch][part], y[batch][part])
        models.append(model)
    assert_equal(models)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "mixed_float16"])
def test_reduced_precision_trains_on_all_ranks(world, rows, policy):
    """Every rank holds the same bits, and comes close to one process."""

    def make():
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(1, dtype=policy)]
        )

    models = both(make, rows, world, compiled={"loss": "mse", "run_eagerly": True})
    # One value of bfloat16 is good to 8 bits, what many were added to, to fewer.
    assert largest_difference(*models) < 0.1
    assert_equal_to_the_bit(models[1])


def test_an_embedding_beside_dense_layers(world, rows):
    """Sparse and dense gradients in one model, rows read several times a batch."""

    def make():
        return keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Lambda(
                    lambda x: tf.cast(tf.abs(x) * 3, tf.int32) % 11,
                    output_shape=(5,),
                ),
                keras.layers.Embedding(11, 3),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )

    assert_equal(both(make, rows, world, compiled={"loss": "mse"}))
