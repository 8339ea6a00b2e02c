"""A loss's graph shows which of its terms are sums over rows."""

import pytest
import tensorflow as tf

from keras_dist.training.loss_kind.probe import Probe, RowGraph, Undecided
from keras_dist.training.loss_kind.terms import terms_of

WEIGHTS = tf.Variable(tf.ones((4, 1)))
SCALE = tf.Variable(0.3)


def outputs(x):
    """What a model computes of a batch."""
    return tf.matmul(x, WEIGHTS)


def rows_of(x):
    """The number of rows, as a float."""
    return tf.cast(tf.shape(x)[0], tf.float32)


def mask_of(x):
    """Some of the rows."""
    return tf.cast(x[:, 0] > 0, tf.float32)


MEANS = {
    "mean": lambda x: tf.reduce_mean(outputs(x) ** 2),
    "sum_by_rows": lambda x: tf.reduce_sum(outputs(x)) / rows_of(x),
    "sum_of_parts": lambda x: tf.reduce_sum(outputs(x) ** 2 / rows_of(x)),
    "with_weights": lambda x: tf.reduce_mean(outputs(x)) + tf.nn.l2_loss(WEIGHTS),
    "of_sums": lambda x: tf.reduce_mean(tf.reduce_sum((x - outputs(x)) ** 2, axis=1)),
    "average_loss": lambda x: tf.nn.compute_average_loss(outputs(x)[:, 0]),
    "of_weights": lambda x: tf.reduce_sum(WEIGHTS),
    "with_random": lambda x: tf.reduce_mean(outputs(x) * tf.random.normal(tf.shape(x))),
}
SUMS = {
    "sum": lambda x: tf.reduce_sum(outputs(x) ** 2),
    "by_a_constant": lambda x: tf.reduce_sum(outputs(x)) / 32,
    "with_a_mean": lambda x: (
        tf.reduce_mean(outputs(x)) - 0.1 * tf.reduce_sum(outputs(x) ** 2)
    ),
    "scaled": lambda x: (
        (tf.reduce_mean(outputs(x)) + tf.reduce_sum(outputs(x))) * SCALE
    ),
    "times_a_weight": lambda x: tf.exp(-WEIGHTS[0, 0]) * tf.reduce_sum(outputs(x)),
    "in_a_function": lambda x: tf.function(tf.nn.l2_loss)(outputs(x)),
    "of_pairs": lambda x: tf.reduce_sum(outputs(x) @ tf.transpose(outputs(x))),
    "if_finite": lambda x: tf.where(
        tf.math.is_nan(tf.reduce_sum(outputs(x))), 0.0, tf.reduce_sum(outputs(x))
    ),
    "in_half": lambda x: tf.cast(
        tf.reduce_sum(tf.cast(outputs(x), tf.float16)), tf.float32
    ),
}
QUOTIENTS = {
    "masked": lambda x: (
        tf.reduce_sum(outputs(x)[:, 0] * mask_of(x)) / tf.reduce_sum(mask_of(x))
    ),
    "masked_safely": lambda x: tf.math.divide_no_nan(
        tf.reduce_sum(outputs(x)[:, 0] * mask_of(x)), 1e-7 + tf.reduce_sum(mask_of(x))
    ),
    "counted": lambda x: (
        tf.reduce_sum(outputs(x))
        / tf.cast(tf.math.count_nonzero(x[:, 0] > 0), tf.float32)
    ),
    "selected": lambda x: tf.reduce_mean(
        tf.boolean_mask(outputs(x)[:, 0], x[:, 0] > 0)
    ),
}
UNDECIDED = {
    "root": lambda x: tf.sqrt(tf.reduce_mean(outputs(x) ** 2)),
    "deviation": lambda x: tf.math.reduce_std(outputs(x)),
    "product": lambda x: tf.reduce_mean(outputs(x)) * tf.reduce_mean(outputs(x) ** 2),
    "differentiated_divisor": lambda x: tf.reduce_sum(x) / tf.reduce_sum(outputs(x)),
    "weighted_mixture": lambda x: (
        tf.exp(-WEIGHTS[0, 0])
        * (tf.reduce_mean(outputs(x)) + tf.reduce_sum(outputs(x)))
    ),
    "python": lambda x: tf.py_function(lambda v: v, [tf.reduce_sum(x)], tf.float32),
}


def read(function, rows):
    """The terms of a function's result, traced with a number of rows or `None`."""
    found = []

    def trace(x):
        value = function(x)
        value.set_shape([])
        terms = terms_of(value, Probe(RowGraph(rows)), sources=[WEIGHTS])
        found.append([term.divisor is not None for term in terms])
        return value

    tf.function(trace, autograph=False).get_concrete_function(
        tf.TensorSpec((rows, 4), tf.float32)
    )
    return found[0]


@pytest.mark.parametrize("rows", [None, 6])
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_has_no_terms(name, rows):
    """Also if the number of rows is a constant of the graph."""
    assert read(MEANS[name], rows) == []


@pytest.mark.parametrize("rows", [None, 6])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_a_term(name, rows):
    """Beside a mean, scaled, and in a function of its own, too."""
    assert read(SUMS[name], rows) == [False]


@pytest.mark.parametrize("rows", [None, 6])
@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_quotient_of_sums_has_a_divisor(name, rows):
    """Its divisor has to be summed over the ranks."""
    assert read(QUOTIENTS[name], rows) == [True]


@pytest.mark.parametrize("rows", [None, 6])
@pytest.mark.parametrize("name", UNDECIDED)
def test_what_is_neither_is_undecided(name, rows):
    """No factor makes it that of the global batch."""
    with pytest.raises(Undecided):
        read(UNDECIDED[name], rows)
