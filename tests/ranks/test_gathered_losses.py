"""A loss of `compile` that is neither a mean nor a sum equals one process.

Its rows are gathered. In float64.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import assert_equals_one_process, shortened, warned
from keras import ops

import keras_dist

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(51, 4))
Y = RANDOM.random((51, 3))
LABELS = RANDOM.integers(0, 3, (51, 5))
LABELS[RANDOM.random((51, 5)) < 0.3] = 9
LABELS[::2, :3] = 9  # more of them on the first of two ranks
MISSING = np.where(RANDOM.random((51, 3)) < 0.4, np.nan, Y)
MISSING[50] = Y[50]
MISSING[:10:2] = np.nan  # the first of two ranks has no label of the first batch
ONE_HAS_NONE = Y.copy()
ONE_HAS_NONE[:10:2] = np.nan  # and the other one has all: a mean, as far as it sees
GROUPS = RANDOM.integers(0, 4, 51)


def masked_mean(y, p):
    """A mean over the labels that are there."""
    is_known = ~tf.math.is_nan(y)
    return tf.reduce_mean(
        tf.square(tf.boolean_mask(y, is_known) - tf.boolean_mask(p, is_known))
    )


def quotient(y, p):
    """The same by a sum and a count."""
    is_known = tf.cast(~tf.math.is_nan(y), p.dtype)
    y = tf.where(tf.math.is_nan(y), tf.zeros_like(y), y)
    return tf.reduce_sum(is_known * tf.square(y - p)) / tf.reduce_sum(is_known)


def weighted_root(y, p):
    """Of `weighted_mean`, the plain mean there, of the rows of all ranks."""
    is_known = ~tf.math.is_nan(y)
    y = tf.where(is_known, y, tf.zeros_like(y))
    return tf.sqrt(keras_dist.weighted_mean(tf.square(y - p), is_known))


def columns(y, p):
    """Each target by its own number of labels."""
    is_known = tf.cast(~tf.math.is_nan(y), p.dtype)
    y = tf.where(tf.math.is_nan(y), tf.zeros_like(y), y)
    sums = tf.reduce_sum(is_known * tf.square(y - p), axis=0)
    return tf.reduce_mean(tf.math.divide_no_nan(sums, tf.reduce_sum(is_known, axis=0)))


def balanced(y, p):
    """Weights by the fraction of positive targets of the batch."""
    share = tf.reduce_mean(tf.cast(y > 0.7, p.dtype))
    return tf.reduce_mean(tf.where(y > 0.7, 1 - share, share) * tf.square(y - p))


def hardest(y, p):
    """The hardest third of the rows."""
    errors = tf.reduce_mean(tf.square(y - p), axis=1)
    return tf.reduce_mean(tf.math.top_k(errors, 1 + tf.size(errors) // 3).values)


def ranking(y, p):
    """All pairs of rows."""
    y, p = y[:, 0], p[:, 0]
    signs = tf.sign(y[:, None] - y[None])
    return tf.reduce_mean(tf.nn.softplus(-signs * (p[:, None] - p[None])))


LOSSES = {
    "masked_mean": (masked_mean, MISSING),
    "none_and_nan": (masked_mean, ONE_HAS_NONE),
    "quotient": (quotient, MISSING),
    "weighted_root": (weighted_root, MISSING),
    "columns": (columns, MISSING),
    "none_and_zero": (columns, ONE_HAS_NONE),
    "hardest": (hardest, Y),
    "ranking": (ranking, Y),
    "balanced": (balanced, Y),
    # Weights that have a gradient, and are divided by their mean.
    "ratio": (lambda y, p: ops.average((y - p) ** 2, weights=1 + ops.exp(-(p**2))), Y),
    # Targets that are scaled by their batch.
    "scaled_targets": (
        lambda y, p: ops.mean(((y - ops.mean(y, 0)) / (ops.std(y, 0) + 1e-3) - p) ** 2),
        Y,
    ),
    # The order of the rows counts.
    "neighbors": (
        lambda y, p: ops.mean(
            ops.abs((y - ops.roll(y, 1, 0)) ** 2 - (p - ops.roll(p, 1, 0)) ** 2)
        ),
        Y,
    ),
    # Keras computes from the logits of probabilities.
    "root_of_logits": (
        lambda y, p: ops.sqrt(
            ops.mean(keras.losses.binary_crossentropy(y, p, from_logits=True))
        ),
        Y,
    ),
    "root": (lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)), Y),
    "dice_of_channels": (
        lambda y, p: (
            1 - ops.mean((2 * ops.sum(y * p, 0) + 1) / (ops.sum(y + p, 0) + 1))
        ),
        Y,
    ),
    "dice": (keras.losses.Dice(dtype="float64"), Y),
    "tversky": (keras.losses.Tversky(alpha=0.3, beta=0.7, dtype="float64"), Y),
    "cosine_over_rows": (
        keras.losses.CosineSimilarity(axis=0, dtype="float64"),
        Y,
    ),
    "circle": (keras.losses.Circle(gamma=2, dtype="float64"), GROUPS),
    "ignore_class": (
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=9, dtype="float64"
        ),
        LABELS,
    ),
    "ignore_class_as_function": (
        lambda y, p: keras.losses.sparse_categorical_crossentropy(
            y, p, from_logits=True, ignore_class=9
        ),
        LABELS,
    ),
}


# What one process has instead.
PLAIN = {"weighted_root": lambda y, p: tf.sqrt(quotient(y, p))}


class Detector(keras.Model):
    """A `compute_loss` that divides by a count of its batch, with two losses."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        """The same numbers, for two losses."""
        return {"boxes": self.dense(x), "classes": self.dense(x)}

    def compute_loss(self, x, y, y_pred, sample_weight=None, **kwargs):
        """By the number of large targets of the batch."""
        positive = ops.cast(y["boxes"][:, 0] > 0.5, "float64")
        self.seen.update_state(y["boxes"][:, 0])
        weights = positive / ops.maximum(ops.sum(positive), 1.0)
        given = {"boxes": weights, "classes": weights}
        return super().compute_loss(x, y, y_pred, sample_weight=given, **kwargs)


class Halved(Detector):
    """A `compute_loss` of a masked mean that logs twice of what it returns."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, **kwargs):
        """Over the rows with a large target."""
        positive = ops.cast(y["boxes"][:, 0] > 0.5, "float64")
        errors = ops.sum(ops.square(y["boxes"] - y_pred["boxes"]), axis=1)
        mean = ops.sum(positive * errors) / ops.maximum(ops.sum(positive), 1.0)
        self.seen.update_state(mean)
        return 0.5 * mean


def make(name, loss=None, **compiled):
    """A compiled model of one of these losses, or of another one for its rows."""
    keras.utils.set_random_seed(3)
    own_loss, y = LOSSES[name]
    outputs = [keras.layers.Dense(15), keras.layers.Reshape((5, 3))]
    if y.ndim == 1:
        outputs = [keras.layers.Dense(6), keras.layers.UnitNormalization()]
    if y.ndim == 2 and y is not LABELS:
        outputs = [keras.layers.Dense(3, activation="sigmoid")]
    model = keras.Sequential([keras.Input((4,)), *outputs])
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(sgd, loss or own_loss, **compiled)
    return model


def fit(name, **options):
    """Train one of them on all ranks; return the warnings."""
    with warned("one process") as texts:
        given = {"batch_size": 10, "batch": "global", "verbose": 0} | options
        keras_dist.dist_fit(make(name), X, LOSSES[name][1], **given)
    return texts


# How all are trained, and which of them `make test` tries: the last batch of ten rows
# has one, so that the other ranks take part without rows.
HOW = {
    'batch="global"': (
        {},
        LOSSES,
        {"none_and_nan", "weighted_root", "cosine_over_rows", "root_of_logits"},
    ),
    'batch="rank"': ({"batch": "rank"}, LOSSES, {"neighbors"}),
    "eagerly": ({"run_eagerly": True}, ["ratio", "dice", "ranking"], set()),
}


def runs():
    """With a batch of all ranks on three ranks, too."""
    for how, (options, names, quick) in HOW.items():
        for name in sorted(names):
            is_on_three = not options and "none" not in name
            marks = [pytest.mark.three_ranks] if is_on_three else []
            marks += [] if name in quick else [pytest.mark.long]
            yield pytest.param(name, options, marks=marks, id=f"{name}, {how}")


@pytest.mark.parametrize(("name", "options"), runs())
def test_a_loss_of_compile_that_is_neither_equals_one_process(name, options):
    """No rank sees alone whether the loss is a mean over rows."""
    compiled = dict(options)
    how = {"batch": compiled.pop("batch", "global"), "epochs": 2, "tolerance": 1e-9}
    how["plain_make"] = lambda: make(name, PLAIN.get(name), **compiled)
    data = X, LOSSES[name][1]
    with warned("one process") as texts:
        assert_equals_one_process(lambda: make(name, **compiled), data, 10, **how)
    assert not texts


@pytest.mark.parametrize("is_eager", shortened([False, True], {False}))
@pytest.mark.parametrize("kind", shortened([Detector, Halved], {Detector}))
def test_means_in_a_compute_loss_that_is_neither_are_logged(kind, is_eager):
    """The last batch has one row, which counts on one rank; all gather it."""

    def make():
        keras.utils.set_random_seed(3)
        model, losses = kind(), None
        if kind is Detector:
            losses = {"boxes": "mse", "classes": "mae"}
        model.compile(keras.optimizers.SGD(0.1), losses, run_eagerly=is_eager)
        return model

    data = X, {"boxes": Y, "classes": Y[::-1]}
    how = {"batch": "global", "epochs": 2, "tolerance": 1e-9}
    with warned("one process") as texts:
        _, logs, _ = assert_equals_one_process(make, data, 10, **how)
    assert not texts and "seen" in logs and ("boxes_loss" in logs) == (kind is Detector)


def test_the_plan_says_how_much_is_gathered(world, capsys):
    """Targets, predictions and their logits of 10 rows, of 3 numbers each."""
    fit("ratio", verbose=2)
    text = f"its rows gathered ({10 * 9 * 8 / 2**20:.2g} MiB a step)"
    assert (text in capsys.readouterr().out) == (world.rank == 0)


@pytest.mark.parametrize("name", shortened(["dice", "ranking"], {"dice"}))
def test_above_the_limit_it_is_said(world, name, monkeypatch):
    """Each rank then computes the loss from its own rows."""
    monkeypatch.setenv("KERAS_DIST_GATHER_MIB", "0.0001")
    assert bool(fit(name)) == (world.rank == 0)


def test_rows_that_are_padded_with_their_batch():
    """Each batch has another length, which all ranks have, and a step does not know."""
    tokens = [RANDOM.integers(1, 9, 2 + 7 * number % 11) for number in range(33)]

    def data(rows):
        kind = tf.TensorSpec([None], tf.int64)
        every = tf.data.Dataset.from_generator(lambda: tokens, output_signature=kind)
        return every.map(lambda x: (x, x % 3)).padded_batch(rows)

    def loss(y, p):
        is_known = tf.cast(y > 0, p.dtype)
        errors = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
        return tf.reduce_sum(errors * is_known) / tf.reduce_sum(is_known)

    def build():
        keras.utils.set_random_seed(3)
        embedding = keras.layers.Embedding(9, 4, mask_zero=True)
        model = keras.Sequential([embedding, keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.5), loss)
        return model

    how = {"batch": "global", "epochs": 2, "tolerance": 1e-9, "logs": ()}
    with warned("one process") as texts:
        assert_equals_one_process(build, data, 10, **how)
    assert not texts
