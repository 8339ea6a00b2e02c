"""Every way to train a Keras model equals one process."""

import keras
import pytest
import tensorflow as tf
from claims import assert_equal_to_the_bit, largest_difference

import keras_dist

pytestmark = pytest.mark.several_ranks

ARGUMENTS = {"epochs": 2, "shuffle": False, "verbose": 0}


def assert_equal(models):
    """The claim of this file."""
    assert largest_difference(*models) < 1e-5
    assert_equal_to_the_bit(models[1])


@pytest.mark.three_ranks
def test_frozen_weights_of_float64_keep_their_bits(world, rows):
    """They are averaged like statistics: of equal values the mean is that value."""
    x, y = rows
    keras.utils.set_random_seed(6)
    frozen = keras.layers.Dense(50, dtype="float64", trainable=False)
    model = keras.Sequential([keras.Input((5,)), frozen, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    before = frozen.get_weights()[0]
    keras_dist.dist_fit(model, x, y, batch_size=8, **ARGUMENTS)
    assert (frozen.get_weights()[0] == before).all()


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


def test_a_loop_of_ones_own(world, rows):
    """`GradientTape` and an optimizer that averages, in a graph."""
    x, y = (array[:48] for array in rows)
    models = []
    for wrap, part in (
        (lambda optimizer: optimizer, slice(None)),
        (keras_dist.DistributedOptimizer, slice(world.rank, None, world.size)),
    ):
        keras.utils.set_random_seed(6)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.optimizer = wrap(keras.optimizers.Adam(0.01, clipnorm=0.1))

        @tf.function
        def step(x, y, model=model):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((model(x, training=True)[:, 0] - y) ** 2)
            weights = model.trainable_variables
            gradients = tape.gradient(loss, weights)
            model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return loss

        for start in (0, 24):
            batch = slice(start, start + 24)
            step(tf.constant(x[batch][part]), tf.constant(y[batch][part]))
        models.append(model)
    assert_equal(models)


def test_variables_of_tensorflow_are_averaged_too(world):
    """A loop of one's own may have made them itself."""
    variable = tf.Variable([0.0])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant([float(world.rank)])], [variable])
    assert variable.numpy() == pytest.approx([-(world.size - 1) / 2])
