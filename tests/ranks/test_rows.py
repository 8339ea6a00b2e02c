"""`sum_over_rows`, `weighted_mean`, `gather_rows`: the losses of one process.

In float64. The oracle's steps do not call them: they compute the same plainly.
"""

import itertools
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_close,
    assert_equals_one_process,
    raises_everywhere,
    shortened,
    warned,
)
from harness.models import Stepping, make_compiled

import keras_dist

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(53, 5))
Y = np.where(RANDOM.random((53, 3)) < 0.4, np.nan, RANDOM.normal(size=(53, 3)))
Y[:9:2] = np.nan  # of two ranks, the first one has no target of the first batch


class Plain:
    """What the functions of this package are on one process."""

    sum_over_rows = gather_rows = staticmethod(lambda values: values)

    @staticmethod
    def weighted_mean(values, weights):
        weights = tf.cast(weights, values.dtype)
        while weights.shape.rank < values.shape.rank:
            weights = weights[..., None]
        weights = weights * tf.ones_like(values)
        return tf.reduce_sum(values * weights) / tf.reduce_sum(weights)


def mean_and_sum(of, x, y, z):
    """A mean and a sum over rows."""
    total = of.sum_over_rows(tf.reduce_sum(tf.abs(z)))
    return tf.reduce_mean(tf.square(z)) + 0.01 * total


def missing_targets(of, x, y, z):
    """A mean over the targets that are not NaN."""
    is_known = ~tf.math.is_nan(y)
    errors = tf.square(tf.where(is_known, y, tf.zeros_like(y)) - z)
    return of.weighted_mean(errors, is_known)


def attention(of, x, y, z):
    """A mean with one weight a row, which has a gradient."""
    return of.weighted_mean(tf.square(z - 1), tf.nn.sigmoid(z[:, 0]))


def negatives(of, x, y, z):
    """Each row against all others, in two views."""
    one, other = of.gather_rows((z, z * tf.cast(x[:, :3], z.dtype)))
    labels = tf.range(tf.shape(one)[0])
    logits = tf.matmul(one, other, transpose_b=True)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


def neighbors(of, x, y, z):
    """A loss that depends on the order of the rows."""
    z = of.gather_rows(z)
    return tf.reduce_mean(tf.square(z[1:] - z[:-1]))


def rows_against_all(of, x, y, z):
    """The rows of a rank against all rows: a mean over the former."""
    every = of.gather_rows(z)
    return tf.reduce_mean(tf.nn.softplus(tf.matmul(z, every, transpose_b=True)), 1)


def several(of, x, y, z):
    """Losses that gather, and one that divides; also of one row."""
    gathering = neighbors(of, x, y, z) + negatives(of, x, y, z)
    return gathering + missing_targets(of, x, y, z)


class Step(Stepping):
    """A train step that computes one of these losses."""

    def __init__(self, loss, of):
        super().__init__()
        self.dense, self.loss_of_rows, self.of = keras.layers.Dense(3), loss, of
        self(X[:1])

    def call(self, x):
        return self.dense(x)

    def loss_of(self, data):
        x, y = data
        return tf.reduce_mean(self.loss_of_rows(self.of, x, y, self(x, training=True)))


def make_step(loss, of, **compiled):
    """A model with such a step."""
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return make_compiled(lambda: Step(loss, of), optimizer, **compiled)


def assert_equal(loss, data=(X, Y), rows=10, *, batch="global", plain=None, **compiled):
    """All ranks train the model of one process, in batches of so many rows."""
    assert_equals_one_process(
        lambda: make_step(loss, keras_dist, **compiled),
        data,
        rows,
        batch=batch,
        plain_make=lambda: make_step(loss, Plain),
        plain_data=plain,
        epochs=2,
        tolerance=1e-10,
    )


@pytest.mark.three_ranks
@pytest.mark.parametrize(
    "loss",
    shortened(
        [mean_and_sum, missing_targets, attention, negatives, neighbors]
        + [rows_against_all],
        {rows_against_all},
    ),
)
def test_a_loss_over_the_rows_of_all_ranks_equals_one_process(loss):
    """The last batch has 3 rows: on two ranks 2 and 1. Keras logs its last step."""
    assert_equal(loss)


@pytest.mark.three_ranks
def test_a_rank_without_rows_takes_part():
    """One row is left for the last batch."""
    assert_equal(several, (X[:51], Y[:51]))


@pytest.mark.three_ranks
@pytest.mark.parametrize(
    ("kind", "batch"),
    shortened(
        itertools.product(["arrays", "batches", "presharded"], ["rank", "global"]),
        {("presharded", "global")},
    ),
)
def test_gathered_rows_have_the_order_of_the_global_batch(kind, batch):
    """Whatever the data: rows side by side, or batches dealt to the ranks in turn."""
    local = keras_dist.local_batch_size(12) if batch == "global" else 12
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    data = {
        "arrays": (X, Y),
        "batches": lambda _: rows.batch(12),
        "presharded": lambda _: rows.apply(keras_dist.shard(12, batch=batch)).batch(
            local
        ),
    }[kind]
    assert_equal(neighbors, data, 12, batch=batch, plain=(X, Y))


@pytest.mark.parametrize(
    ("loss", "how"),
    shortened(
        itertools.product(
            [mean_and_sum, missing_targets, neighbors], ["run_eagerly", "jit_compile"]
        ),
        {(missing_targets, "jit_compile")},
    ),
)
def test_it_does_so_without_a_graph_and_under_xla(world, loss, how):
    """XLA compiles no collective: that step runs without it, with a warning."""
    with warned("without XLA") as messages:
        assert_equal(loss, **{how: True})
    is_said = how == "jit_compile" and loss is not mean_and_sum and world.rank == 0
    assert bool(messages) == is_said, messages
    assert all("communicates with the other ranks" in text for text in messages)


def test_a_loop_of_the_users_own_equals_one_process(world):
    """Each rank has a half of the rows; `DistributedOptimizer` averages."""
    rank, size = world.rank, world.size
    own = slice(rank * 12, rank * 12 + 12)
    for loss in (mean_and_sum, missing_targets, negatives, neighbors):
        found = []
        for of, part in ((Plain, slice(0, 12 * size)), (keras_dist, own)):
            optimizer = keras.optimizers.SGD(0.1)
            if of is keras_dist:
                optimizer = keras_dist.DistributedOptimizer(optimizer)
            model = make_compiled(lambda loss=loss, of=of: Step(loss, of))
            with tf.GradientTape() as tape:
                value = model.loss_of((tf.constant(X[part]), tf.constant(Y[part])))
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            found.append(model.get_weights())
        assert_close(*found, 1e-11)


def test_an_evaluation_and_a_prediction_compute_them_plainly(world):
    """Ranks may evaluate another number of batches: no collective is in them."""

    class Evaluates(Step):
        def test_step(self, data):
            return {"value": self.loss_of(data)}

        def predict_step(self, data):
            return self.of.gather_rows(self(data))

    for loss in (negatives, missing_targets, mean_and_sum):
        model = Evaluates(loss, keras_dist)
        model.compile()
        many = keras_dist.DistributedModel(model)
        many.evaluate(X[:13], Y[:13], 4, verbose=0)
    assert len(many.predict(X[:13], 4, verbose=0)) == 13


def test_an_unusable_argument_is_an_error_everywhere():
    """It says what was received."""
    for call, text in (
        (lambda: keras_dist.sum_over_rows(tf.ones(3)), "a tensor of shape (3,)"),
        (
            lambda: keras_dist.weighted_mean(tf.ones(3), tf.ones((3, 2))),
            "weights of shape (3, 2)",
        ),
    ):
        raises_everywhere(ValueError, call, "Received: ", text)

    def views(of, x, y, z):
        return tf.reduce_mean(of.gather_rows(tf.concat([z, z], 0)))

    for compiled in ({"run_eagerly": True}, {}):
        kinds = ValueError, tf.errors.InvalidArgumentError
        model = make_step(views, keras_dist, **compiled)
        call = partial(keras_dist.dist_fit, model, X, Y, batch_size=10, verbose=0)
        raises_everywhere(kinds, call, "one entry for each row")
