"""Small models of every kind, and rows for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Subject:
    """A kind of model.

    Args:
        make: Makes it, not compiled.
        rows: Makes so many rows of `x` and `y`.
        loss: That suits it.
    """

    make: Callable[[], Any]
    rows: Callable[[int], Any]
    loss: Any = "mse"


def vectors(count):
    """Rows of five numbers with a label; the same on every rank."""
    x = np.random.default_rng(0).normal(size=(count, 5)).astype("float32")
    return x, (x.sum(axis=1) > 0).astype("float32")


def words(count):
    """Rows of four words of eleven, some of them read often; with a label."""
    generator = np.random.default_rng(1)
    x = np.minimum(generator.geometric(0.3, size=(count, 4)), 10).astype("int32")
    return x, (x[:, 0] > 2).astype("float32")


def few_words(count):
    """As `words`, of three."""
    x, y = words(count)
    return x % 3, y


def many_words(count):
    """As `words`, in a vocabulary of which a batch reads little."""
    x, y = words(count)
    return x * 37, y


def sentences(count):
    """Rows of six words, padded with zeros to it, and a label for each word."""
    x = np.random.default_rng(2).integers(1, 11, size=(count, 6)).astype("int32")
    x[np.arange(6)[None, :] > np.arange(count)[:, None] * 7 % 6] = 0
    return x, (x % 2).astype("float32")[..., None]


def nested(count):
    """A dict of two inputs and a dict of two targets."""
    x, y = vectors(count)
    return {"a": x, "b": x[:, :2]}, {"sum": y, "first": x[:, 0]}


def far(count):
    """Rows whose mean is far from zero."""
    x, y = vectors(count)
    return 10 + x, y


def pictures(count):
    """Rows of 6×6 pictures of one channel."""
    x = np.random.default_rng(3).normal(size=(count, 6, 6, 1)).astype("float32")
    return x, (x.sum(axis=(1, 2, 3)) > 0).astype("float32")


def perceptron():
    """Two layers, built."""
    return keras.Sequential([keras.Input((5,)), *_layers()])


def unbuilt():
    """The same without `Input`."""
    return keras.Sequential(_layers())


def regularized():
    """With a constraint, regularizers and a loss of its own activity."""
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(
                8,
                activation="tanh",
                kernel_regularizer=keras.regularizers.L2(0.01),
                bias_constraint=keras.constraints.MaxNorm(0.05),
            ),
            keras.layers.ActivityRegularization(l2=0.01),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def embedding(size=11):
    """Rows of a table beside dense layers."""
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(size, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def in_precision(policy):
    """A layer that computes in another dtype."""
    policy = keras.mixed_precision.DTypePolicy(policy)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, dtype=policy)])


def update(tape, loss, optimizer, *models):
    """Update the weights of some models once."""
    weights = [weight for model in models for weight in model.trainable_variables]
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class Stepping(keras.Model):
    """A train step that differentiates a loss, by one optimizer.

    Beside `keras.Sequential` as a second base class, it has no `call` of its own.
    """

    def loss_of(self, data):
        """The loss of what Keras gives a step."""
        raise NotImplementedError

    def report(self, loss):
        """The logs of a step with this loss."""
        return {"loss": loss}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        update(tape, loss, self.optimizer, self)
        return self.report(loss)


def make_compiled(make, *arguments, seed=3, **options):
    """A new, compiled model, with the same weights at each call.

    Args:
        make: Makes the model after the seed was set.
        *arguments: Of `compile`.
        seed: Of the weights.
        **options: Of `compile`.
    """
    keras.utils.set_random_seed(seed)
    model = make()
    model.compile(*arguments, **options)
    return model


class AddsSum(keras.layers.Layer):
    """Adds a loss that is the sum of its inputs' squares, in float32."""

    def call(self, x):
        squares = keras.ops.square(keras.ops.cast(x, "float32"))
        self.add_loss(0.05 * keras.ops.sum(squares))
        return x


class StepOfVector(keras.Sequential):
    """A `train_step` that differentiates one scaled loss a row, small ones.

    The sum of larger ones overflows in float16, on one process too.
    """

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y = keras.ops.cast(y, self.compute_dtype)[:, None]
            losses = 0.01 * keras.ops.mean((self(x, training=True) - y) ** 2, axis=1)
            scaled = self.optimizer.scale_loss(losses)
        update(tape, scaled, self.optimizer, self)
        return {"loss": keras.ops.mean(losses)}


def all_in_precision(policy, kind=keras.Sequential, middle=()):
    """A model of this policy, so that `compile` scales the loss of float16."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        first = keras.layers.Dense(4, activation="tanh")
        layers = [make() for make in middle]
        return kind([keras.Input((5,)), first, *layers, keras.layers.Dense(1)])
    finally:
        keras.config.set_dtype_policy(before)


def tagger():
    """Masked sequences with a loss for each word that is not padding."""
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(11, 4, mask_zero=True),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def two_inputs():
    """Dicts in and out."""
    a, b = keras.Input((5,), name="a"), keras.Input((2,), name="b")
    x = keras.layers.Concatenate()([keras.layers.Dense(4)(a), b])
    outputs = {name: keras.layers.Dense(1, name=name)(x) for name in ("sum", "first")}
    return keras.Model({"a": a, "b": b}, outputs)


def normalized():
    """Normalization by the global batch, twice."""
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(6, activation="tanh", bias_initializer="ones"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(1),
        ]
    )


def dropping():
    """Statistics of batches, and dropout."""
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def convolution():
    """Pictures."""
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(3, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(1),
        ]
    )


class Repeated(keras.Model):
    """A subclassed model whose layers have one name."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(5, name="dense")
        self.second = keras.layers.Dense(1, name="dense")

    def call(self, x):
        return self.second(self.first(x))


class OwnLoss(keras.Model):
    """`compute_loss` of its own, `add_loss`, and a variable that nothing reaches."""

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


class OwnStep(Stepping):
    """A `train_step` of its own."""

    def __init__(self):
        super().__init__()
        self.inner = perceptron()

    def call(self, x):
        return self.inner(x)

    def loss_of(self, data):
        x, y = data
        return keras.ops.mean((self(x, training=True)[:, 0] - y) ** 2)


SUBJECTS = {
    "perceptron": Subject(perceptron, vectors, "binary_crossentropy"),
    "unbuilt": Subject(unbuilt, vectors),
    "regularized": Subject(regularized, vectors, "binary_crossentropy"),
    "embedding": Subject(embedding, words),
    "large embedding": Subject(lambda: embedding(500), many_words),
    "tiny embedding": Subject(lambda: embedding(3), few_words),
    "half": Subject(lambda: in_precision("mixed_float16"), vectors),
    "brain": Subject(lambda: in_precision("mixed_bfloat16"), vectors),
    "all brain": Subject(lambda: in_precision("bfloat16"), vectors),
    **{
        f"{policy}, {name}": Subject(
            lambda policy=policy, given=given: all_in_precision(policy, **given),
            vectors,
        )
        for policy in ("mixed_float16", "mixed_bfloat16")
        for name, given in (
            ("a mean", {}),
            ("add_loss of a sum", {"middle": [AddsSum]}),
            ("a loss for each row", {"kind": StepOfVector}),
        )
    },
    "tagger": Subject(tagger, sentences),
    "two inputs": Subject(two_inputs, nested),
    "normalized": Subject(normalized, far),
    "convolution": Subject(convolution, pictures),
    "repeated names": Subject(Repeated, vectors),
    "own loss": Subject(OwnLoss, vectors),
    "own step": Subject(OwnStep, vectors),
}


def _layers():
    return [
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
