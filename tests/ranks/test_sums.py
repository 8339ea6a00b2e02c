"""A loss that is a sum equals one process, wherever it is computed.

In float64, since a wrong factor of one small term would pass for rounding.
"""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import assert_equals_one_process, shortened, warned
from harness.models import Stepping, sentences, tagger
from keras import ops

import keras_dist

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(22, 5)), RANDOM.normal(size=(22, 3))


class Detects(keras.Sequential):
    """Divides weights by the number of elements that count, as detectors do."""

    function = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        """A loss of Keras, with weights for each element."""
        weights = self.function(ops.cast(x[:, :3] > 1, "float64"))
        return super().compute_loss(x, y[..., None], y_pred[..., None], weights)


class AddsLoss(keras.layers.Layer):
    """Adds a loss of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


class Computes(keras.Sequential):
    function = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return self.function(x, y, y_pred)


class Steps(Stepping, keras.Sequential):
    """Has a train step of its own, and logs its loss in two ways."""

    function = None

    def __init__(self, layers):
        super().__init__(layers)
        self.logged = keras.metrics.Mean("logged")

    @property
    def metrics(self):
        """The metrics that Keras resets."""
        return [self.logged]

    def loss_of(self, data):
        x, y = data
        return self.function(x, y, self(x, training=True))

    def report(self, loss):
        self.logged.update_state(loss)
        return {"logged": self.logged.result(), "last": tf.reduce_sum(loss)}


def layers(function=None):
    """Layers of a small model, with the same weights at each call."""
    keras.utils.set_random_seed(3)
    dense = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")
    middle = [] if function is None else [AddsLoss(function)]
    return [keras.Input((5,)), dense, *middle, keras.layers.Dense(3)]


def added(function):
    """A model with a loss of `add_loss` beside that of `compile`."""
    return keras.Sequential(layers(function)), "mse"


def calling(kind, loss=None):
    """A function that makes a model of a class, which calls what it is given.

    `loss` makes one to compile with, of the dtype of the test.
    """

    def make(function):
        model = kind(layers())
        model.function = function
        return model, loss and loss()

    return make


computed, stepped = calling(Computes), calling(Steps)
detected, detected_mean = (
    calling(Detects, partial(keras.losses.MeanSquaredError, reduction=reduction))
    for reduction in ("sum", "sum_over_batch_size")
)


def compiled(loss):
    """A model that is compiled with a loss."""
    return keras.Sequential(layers()), loss


def summed(reduction):
    """A model that is compiled with a loss of Keras."""
    return compiled(keras.losses.MeanSquaredError(reduction=reduction))


def squares(y, p):
    return (y - p) ** 2


def shared_out(mask):
    """Weights as RetinaNet has them: all elements count if there is one at all."""
    count = ops.sum(mask)
    weights = (mask + 0.5) / ops.maximum(count, 1.0)
    return ops.cond(count == 0, lambda: ops.zeros_like(weights), lambda: weights)


def rows_of(x):
    return ops.cast(ops.shape(x)[0], "float64")


def masked_mean(x, y, p):
    """A mean over some of the elements, whose number differs from rank to rank."""
    mask = ops.cast(x[:, :3] > 0, "float64")
    return ops.sum(squares(y, p) * mask) / ops.sum(mask)


def mixed(x, y, p):
    """A mean and a sum."""
    return ops.mean(squares(y, p)) + 0.05 * ops.sum(ops.abs(p))


def mixed_and_marked(x, y, p):
    """The same, in a step of its own: nothing else tells its terms apart."""
    total = keras_dist.sum_over_rows(0.05 * ops.sum(ops.abs(p)))
    return ops.mean(squares(y, p)) + total


def root(x, y, p):
    """A root of a mean is no mean of roots: no factor makes it one."""
    return ops.sqrt(ops.mean(squares(y, p)))


CASES = {
    "add_sum": (added, lambda x: 0.1 * ops.sum(x**2)),
    "add_vector": (added, lambda x: 0.1 * ops.sum(x**2, axis=1)),
    "add_mean": (added, lambda x: ops.mean(x**2)),
    "compute_sum": (computed, lambda x, y, p: 0.1 * ops.sum(squares(y, p))),
    "compute_vector": (computed, lambda x, y, p: ops.sum(squares(y, p), axis=1)),
    "compute_mixed": (computed, mixed),
    "own_vector": (stepped, lambda x, y, p: 0.1 * ops.mean(squares(y, p), axis=1)),
    "own_sum": (stepped, lambda x, y, p: 0.05 * ops.sum(squares(y, p))),
    "own_mean": (stepped, lambda x, y, p: ops.mean(squares(y, p))),
    "own_mixed": (stepped, mixed_and_marked),
    "own_sum_by_rows": (
        stepped,
        lambda x, y, p: ops.sum(squares(y, p) / rows_of(x)),
    ),
    "compute_masked": (computed, masked_mean),
    "compute_root": (computed, root),
    "compiled_sum": (compiled, lambda y, p: 0.1 * ops.sum(squares(y, p))),
    "compiled_mean": (compiled, lambda y, p: ops.mean(squares(y, p))),
    "Loss_sum": (summed, "sum"),
    "weights_sum": (detected, shared_out),
    "weights_mean": (detected_mean, shared_out),
    "weights_by_mean": (detected_mean, lambda mask: mask / (0.1 + ops.mean(mask))),
}


def make_case(make, function, **compiled):
    """The model of a case."""
    model, loss = make(function)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, **compiled)
    return model


GRAPH, EAGER, XLA = "jit_compile=False", "run_eagerly", "jit_compile"
EAGERLY = ["add_sum", "compute_vector", "own_vector", "own_sum", "own_mean"]
EAGERLY += ["own_mixed", "compute_mixed", "weights_sum"]
RUNS = [(name, GRAPH) for name in CASES] + [(name, EAGER) for name in EAGERLY]
RUNS += [(name, XLA) for name in ("own_mixed", "own_vector", "add_sum")]

# On three ranks: a wrong factor of two may cancel out on two.
ON_THREE = [("own_vector", GRAPH), ("add_sum", GRAPH)]
ON_TWO = [("weights_sum", GRAPH), ("compute_vector", EAGER)]


@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param(*run, marks=pytest.mark.three_ranks) for run in ON_THREE]
    + shortened([run for run in RUNS if run not in ON_THREE], ON_TWO),
)
def test_a_loss_equals_one_process(name, how):
    """Weights and logs, in a graph, without one, and with XLA."""
    option, _, is_off = how.partition("=")
    (make, function), how = CASES[name], {option: not is_off}
    # Outside of a fit, `sum_over_rows` marks a sum over the rows of all ranks, too.
    plain = mixed if name == "own_mixed" else function
    with warned() as messages:
        assert_equals_one_process(
            lambda: make_case(make, function, **how),
            (X, Y),
            plain_make=lambda: make_case(make, plain, **how),
            epochs=2,
            tolerance=1e-11,
        )
    wrong = ("differs from the gradient", "Training without XLA")
    assert not [m for m in messages if any(text in m for text in wrong)]


@pytest.mark.parametrize("batches", shortened([None, 2], {2}))
def test_a_scaled_loss_equals_one_process(batches):
    """Keras divides the gradients again, before it accumulates them."""

    def make():
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.layers.Dense(3)])
        scaled = {"loss_scale_factor": 64.0, "gradient_accumulation_steps": batches}
        model.compile(keras.optimizers.SGD(0.1, **scaled), "mse")
        return model

    assert_equals_one_process(make, (X, Y), 4, batch="global", tolerance=1e-10)


@pytest.mark.parametrize("columns", shortened([1, 6], {1}))
def test_a_mean_divides_by_the_weights_of_all_rows(columns):
    """Weights of rows or of words, of which some are masked."""
    x, y = sentences(22)
    weights = np.random.default_rng(4).uniform(size=(22, columns))

    def make():
        keras.utils.set_random_seed(7)
        model = tagger()
        reduction = "mean_with_sample_weight"
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
        return model

    how = {"batch": "global", "tolerance": 1e-10, "sample_weight": weights}
    assert_equals_one_process(make, (x, y), 4, **how)


def test_more_elements_than_horovod_counts_are_an_error_on_all_ranks():
    """It counts in 32 bits: the number became another one, or negative."""
    for count in (2**31, 2**32 + 5):
        for collective in (keras_dist.sum, keras_dist.average, keras_dist.broadcast):
            traced = tf.function(
                lambda c=collective, n=count: c(tf.zeros((n,), "int64"))
            )
            with pytest.raises(ValueError, match=f"with {count:,} elements. Divide it"):
                traced.get_concrete_function()
    assert keras_dist.sum(1) == keras_dist.size()
