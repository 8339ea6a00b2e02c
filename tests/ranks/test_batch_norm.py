"""`BatchNormalization` by the rows of the global batch, in models as users write them.

The oracle is plain Keras on one process, with Keras's own `BatchNormalization`.
"""

import keras
import numpy as np
import pytest
from harness.claims import assert_equals_one_process, shortened

import keras_dist

layers, ops = keras.layers, keras.ops

pytestmark = [
    pytest.mark.several_ranks,
    pytest.mark.three_ranks,
    pytest.mark.usefixtures("in_float64"),
]

NUM_ROWS = 41  # of which the last batch of ten has one: some ranks have none


def compiled(model, loss="mse", optimizer=None, **more):
    """A model that is trained without XLA: plain Keras has other roundings there."""
    # Not Adam: it makes a step of the rounding of a gradient that is 0, as that of a
    # bias before a normalization is.
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, loss, **{"jit_compile": False, **more})
    return model


def images():
    """Small images, with a mask of one channel for each."""
    generator = np.random.default_rng(0)
    x = 3.0 + 2.0 * generator.normal(size=(NUM_ROWS, 8, 8, 2))
    return x, (x[..., :1] > 3.5) * 1.0


def vectors():
    """Rows of numbers far from a mean of 0, and a number for each."""
    generator = np.random.default_rng(1)
    x = 5.0 + generator.normal(size=(NUM_ROWS, 6))
    return x, x[:, :1] - x[:, 1:2] ** 2 / 10


def segmentation():
    """A U-Net with `Dice`."""

    def block(x, width):
        x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.BatchNormalization()(x))

    inputs = keras.Input((8, 8, 2))
    wide = block(inputs, 4)
    narrow = block(layers.MaxPooling2D()(wide), 8)
    joined = layers.Concatenate()([layers.UpSampling2D()(narrow), wide])
    outputs = layers.Conv2D(1, 1, activation="sigmoid")(block(joined, 4))
    return compiled(keras.Model(inputs, outputs), "dice"), images()


def sequence():
    """A masked sequence: padding counts in no statistic."""
    x = np.repeat(vectors()[0][:, None], 4, axis=1) * np.arange(1, 5)[:, None]
    x[np.arange(4)[None, :] > np.arange(NUM_ROWS)[:, None] % 4] = 0.0
    inputs = keras.Input((4, 6))
    hidden = layers.BatchNormalization()(layers.Masking()(inputs))
    outputs = layers.Dense(1)(layers.LSTM(5)(hidden))
    return compiled(keras.Model(inputs, outputs)), (x, x.mean(axis=(1, 2))[:, None] / 9)


def nested():
    """Layers in a model in a model, of which one is frozen and one shared."""
    inner = keras.Sequential(
        [layers.Dense(4), layers.BatchNormalization(momentum=0.5), layers.ReLU()]
    )
    frozen = layers.BatchNormalization(trainable=False)
    shared = layers.BatchNormalization()
    inputs = keras.Input((6,))
    x = frozen(inner(shared(inputs)))
    outputs = layers.Dense(1)(layers.Concatenate()([x, shared(2.0 * inputs)]))
    return compiled(keras.Model(inputs, outputs)), vectors()


class Coder(keras.Model):
    """A step of its own that calls a layer twice, and adds a loss."""

    def __init__(self):
        super().__init__()
        self.norm, self.code = layers.BatchNormalization(), layers.Dense(3)
        self.decode = layers.Dense(6)

    def call(self, x, training=False):
        code = self.code(self.norm(x, training=training))
        self.add_loss(0.1 * ops.mean(ops.square(code)))
        return self.decode(self.norm(x + 1.0, training=training))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + ops.mean(ops.abs(y_pred))


def coder():
    """A subclass with `add_loss`, `compute_loss` and two calls of one layer."""
    x, _ = vectors()
    return compiled(Coder()), (x, x)


class Variational(keras.Model):
    """A variational autoencoder: normalized, with a divergence by `add_loss`."""

    def __init__(self):
        super().__init__()
        self.norm, self.both = layers.BatchNormalization(), layers.Dense(4)
        self.decode = layers.Dense(6)

    def call(self, x, training=False):
        mean, log_var = ops.split(self.both(self.norm(x, training=training)), 2, axis=1)
        divergence = ops.exp(log_var) + ops.square(mean) - 1 - log_var
        self.add_loss(0.05 * ops.mean(ops.sum(divergence, axis=1)))
        if training:
            mean += ops.exp(log_var / 2) * keras.random.normal(ops.shape(mean))
        return self.decode(mean)


def variational():
    """Draws from a distribution for each row, after a normalization."""
    x, _ = vectors()
    return compiled(Variational()), (x, x)


def recommender():
    """Vectors of users and films, normalized, with dropout."""
    ids = np.random.default_rng(2).integers(0, 7, (NUM_ROWS, 2))
    inputs = keras.Input((2,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(7, 4)(inputs))
    x = layers.Dropout(0.3)(layers.BatchNormalization()(x))
    return compiled(keras.Model(inputs, layers.Dense(1)(x))), (ids, ids[:, :1] / 7.0)


def accumulated():
    """Gradients of two steps are added up before an update; dropout in each."""
    model = keras.Sequential([keras.Input((6,)), layers.BatchNormalization()])
    model.add(layers.Dropout(0.3))
    model.add(layers.Dense(1))
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    return compiled(model, optimizer=optimizer), vectors()


def weighted_sum():
    """A summed loss, clipped gradients, no graph."""
    model = keras.Sequential([keras.Input((6,)), layers.BatchNormalization()])
    model.add(layers.Dense(1))
    loss = keras.losses.MeanSquaredError(reduction="sum")
    optimizer = keras.optimizers.SGD(0.001, clipnorm=1.0)
    return compiled(model, loss, optimizer, run_eagerly=True), vectors()


MODELS = {f.__name__: f for f in (segmentation, sequence, nested, coder)}
MODELS |= {f.__name__: f for f in (accumulated, weighted_sum, variational, recommender)}


@pytest.mark.parametrize("name", shortened(MODELS, {"segmentation", "nested"}))
def test_a_model_with_it_equals_one_process(name):
    """Weights, moving statistics and logs; validation every second epoch."""
    make, (x, y) = (lambda: MODELS[name]()[0]), MODELS[name]()[1]

    def seeded():
        keras.utils.set_random_seed(4)
        return make()

    more = {"validation_data": (x[:17], y[:17]), "validation_freq": 2}
    given = {"batch": "global", "epochs": 3, "tolerance": 1e-9} | more
    assert_equals_one_process(seeded, (x, y), 10, **given)


def test_two_phases_of_a_transfer_equal_one_process():
    """Frozen, then thawed and compiled again; the plan says what is normalized how."""
    x, y = vectors()

    def make():
        keras.utils.set_random_seed(4)
        body = keras.Sequential([layers.Dense(4), layers.BatchNormalization()])
        return body, keras.Sequential([keras.Input((6,)), body, layers.Dense(1)])

    found = []
    for fit in (keras.Model.fit, keras_dist.dist_fit):
        more = {} if fit is keras.Model.fit else {"batch": "global"}
        body, model = make()
        losses = []
        for trainable in (False, True):
            body.trainable = trainable
            compiled(model)
            history = fit(model, x, y, batch_size=10, epochs=2, verbose=0, **more)
            losses += history.history["loss"]
        found.append((losses, model.get_weights()))
    (plain_losses, plain), (losses, ours) = found
    np.testing.assert_allclose(losses, plain_losses, 1e-9)
    for own, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("how", ["default", "rank", "layer"])
def test_the_rows_of_a_rank_are_an_option_and_the_plan_says_so(capsys, world, how):
    """Of a layer that is synchronized, they are those of all ranks nevertheless."""
    x, y = vectors()
    normalize = layers.BatchNormalization(synchronized=how == "layer")
    model = keras.Sequential([keras.Input((6,)), normalize, layers.Dense(1)])
    given = {} if how == "default" else {"batch_norm": "rank"}
    batch = {"batch": "rank" if how == "default" else "global"}
    keras_dist.dist_fit(compiled(model), x, y, 10, verbose=2, **given, **batch)
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    text = (
        "batch normalization 1 layer, rows of each rank: not the model of one process"
    )
    if how == "layer":
        text = "batch normalization 1 layer, global batch"
    assert (text in printed) == (world.rank == 0)
