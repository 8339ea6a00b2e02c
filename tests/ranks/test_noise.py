"""Random numbers of a step: of the global batch, those that one process draws.

The oracle is plain Keras on one process, with Keras's own layers.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import assert_equals_one_process, models_in, shortened

import keras_dist

layers, ops = keras.layers, keras.ops

pytestmark = [
    pytest.mark.several_ranks,
    pytest.mark.three_ranks,
    pytest.mark.usefixtures("in_float64"),
]

NUM_ROWS = 23  # of which the last batch of seven has two: some ranks have none

PICTURE, SEQUENCE, VECTOR = (6, 6, 3), (5, 4), (8,)

LAYERS = {
    "Dropout": (VECTOR, lambda: layers.Dropout(0.5)),
    "AlphaDropout": (VECTOR, lambda: layers.AlphaDropout(0.3)),
    "GaussianDropout": (VECTOR, lambda: layers.GaussianDropout(0.3)),
    "GaussianNoise": (VECTOR, lambda: layers.GaussianNoise(0.5)),
    "SpatialDropout1D": (SEQUENCE, lambda: layers.SpatialDropout1D(0.4)),
    "SpatialDropout2D": (PICTURE, lambda: layers.SpatialDropout2D(0.4)),
    "TimeDistributed": (
        SEQUENCE,
        lambda: layers.TimeDistributed(layers.Dropout(0.5)),
    ),
    "LSTM": (
        SEQUENCE,
        lambda: layers.LSTM(3, dropout=0.3, recurrent_dropout=0.2),
    ),
    "RandomFlip": (PICTURE, layers.RandomFlip),
    "RandomZoom": (PICTURE, lambda: layers.RandomZoom(0.3)),
    "RandomTranslation": (PICTURE, lambda: layers.RandomTranslation(0.2, 0.2)),
    "RandomCrop": (PICTURE, lambda: layers.RandomCrop(4, 4)),
    "RandomBrightness": (PICTURE, lambda: layers.RandomBrightness(0.3)),
    "AugMix": (PICTURE, lambda: layers.AugMix((0, 1), data_format="channels_last")),
    "RandAugment": (PICTURE, lambda: layers.RandAugment((0, 1))),
    "RandomColorJitter": (
        PICTURE,
        lambda: layers.RandomColorJitter((0, 1), 0.3, 0.3, 0.3, 0.3),
    ),
    "RandomErasing": (PICTURE, lambda: layers.RandomErasing(value_range=(0, 1))),
    "RandomRotation": (PICTURE, lambda: layers.RandomRotation(0.3)),
    **{
        name: (PICTURE, functools.partial(getattr(layers, name), **how))
        for name, how in {
            "RandomColorDegeneration": {"factor": 0.5},
            "RandomGaussianBlur": {"factor": 0.9},
            "RandomGrayscale": {"factor": 0.5},
            "RandomHue": {"factor": 0.5, "value_range": (0, 1)},
            "RandomInvert": {"factor": 0.5, "value_range": (0, 1)},
            "RandomPerspective": {"factor": 0.5},
            "RandomPosterization": {"factor": 4, "value_range": (0, 1)},
            "RandomSaturation": {"factor": 0.5, "value_range": (0, 1)},
            "RandomSharpness": {"factor": 0.5, "value_range": (0, 1)},
        }.items()
    },
    "RandomShear": (PICTURE, lambda: layers.RandomShear(0.3, 0.3)),
    "RandomContrast": (PICTURE, lambda: layers.RandomContrast(0.3)),
}
IN_FLOAT32 = {"RandAugment", "RandomPerspective", "RandomRotation"}
QUICK = {"Dropout", "SpatialDropout2D", "LSTM", "RandomFlip", "TimeDistributed"}


class Attends(keras.Model):
    """Attention with dropout, and a sample of a normal distribution for each row."""

    def __init__(self):
        super().__init__()
        self.attend = layers.MultiHeadAttention(2, 3, dropout=0.3)
        self.last = layers.Dense(1)

    def call(self, x, training=False):
        x = ops.mean(self.attend(x, x, training=training), axis=1)
        if training:
            x += 0.3 * keras.random.normal(ops.shape(x))
            x += 0.3 * keras.random.truncated_normal(ops.shape(x))
            x *= keras.random.uniform(())  # the same for all rows
            x += 0.3 * keras.random.beta(ops.shape(x), 0.4, ops.exp(x))
            for alpha in (2.0, ops.cast([0.5, 1, 2, 3], x.dtype), ops.exp(x)):
                x += 0.1 * keras.random.gamma(ops.shape(x), alpha)
            x += 0.1 * keras.random.binomial(ops.shape(x), 5.0, 0.3)
        return self.last(x)


def data_for(shape):
    """Rows of pictures, sequences or vectors between 0 and 1, and a number for each."""
    x = np.random.default_rng(5).uniform(size=(NUM_ROWS, *shape))
    return x, x.reshape(NUM_ROWS, -1)[:, :2].sum(axis=1, keepdims=True)


def maker(build, **compiled):
    """A function that makes the same compiled model at each call."""

    def make():
        keras.utils.set_random_seed(9)
        model = build()
        how = {"jit_compile": False, **compiled}
        model.compile(keras.optimizers.SGD(0.05), "mse", **how)
        return model

    return make


def stack(shape, layer):
    """A model of one random layer and a dense one."""
    return keras.Sequential(
        [keras.Input(shape), layer(), layers.Flatten(), layers.Dense(1)]
    )


def assert_equals(make, data, size=7, **arguments):
    """The claim of this file."""
    given = {"batch": "global", "epochs": 3, "tolerance": 1e-9} | arguments
    return assert_equals_one_process(make, data, size, **given)


@pytest.mark.parametrize("name", shortened(LAYERS, QUICK))
def test_a_random_layer_equals_one_process(name):
    """Weights and losses of three epochs, with an uneven last batch."""
    shape, layer = LAYERS[name]
    if name in IN_FLOAT32:  # Keras computes no others
        with models_in("float32"):
            make = maker(lambda: stack(shape, layer))
            assert_equals(make, data_for(shape), tolerance=1e-5)
    else:
        assert_equals(maker(lambda: stack(shape, layer)), data_for(shape))


@pytest.mark.parametrize(
    "how",
    shortened(["run_eagerly", "steps_per_execution", ""], {"run_eagerly", ""}),
)
def test_draws_of_a_model_equal_one_process(how):
    """Of functions without a seed, too; in a graph or not."""
    more: dict = {how: 2 if how == "steps_per_execution" else True} if how else {}
    assert_equals(maker(Attends, **more), data_for(SEQUENCE))


@pytest.mark.parametrize("batch", shortened(["rank", "global"], {"rank"}))
def test_batches_of_a_data_set_have_the_numbers_of_one_process(batch):
    """Dealt whole to the ranks, or shared by them."""
    x, y = data_for(VECTOR)

    def data(size):
        rows = tf.data.Dataset.from_tensor_slices((x[:21], y[:21]))
        return rows.batch(size)

    make = maker(lambda: stack(VECTOR, lambda: layers.Dropout(0.5)))
    assert_equals(make, data, 7 if batch == "global" else 2, batch=batch)


def test_a_second_fit_goes_on_where_the_first_has_ended():
    """The generators' states are those of one process."""
    x, y = data_for(VECTOR)
    found = []
    for fit, more in (
        (keras.Model.fit, {}),
        (keras_dist.dist_fit, {"batch": "global"}),
    ):
        model = maker(lambda: stack(VECTOR, lambda: layers.GaussianNoise(0.5)))()
        given = {"batch_size": 7, "epochs": 2, "verbose": 0} | more
        losses = [fit(model, x, y, **given).history["loss"] for _ in range(2)]
        found.append((losses, model.get_weights()))
    np.testing.assert_allclose(found[1][0], found[0][0], 1e-9)
    for own, other in zip(found[1][1], found[0][1], strict=True):
        np.testing.assert_allclose(own, other, 1e-8)


class Chooses(keras.Model):
    """Keeps what each of its rows has drawn, in a column for each kind."""

    seen: list = []

    def __init__(self):
        super().__init__()
        self.last = layers.Dense(1)

    def call(self, x, training=False):
        if training:
            alpha = ops.ones((ops.shape(x)[0],))
            columns = [
                keras.random.binomial(ops.shape(alpha), 1000.0 * alpha, 0.5 * alpha),
                keras.random.categorical(ops.zeros((ops.shape(x)[0], 10**6)), 1)[:, 0],
            ]
            kinds = [np.asarray(column, "float64") for column in columns]
            Chooses.seen.append(np.stack(kinds, axis=1))
        return self.last(x)


def test_what_is_drawn_from_arguments_differs_on_each_rank(world, monkeypatch):
    """`binomial` and `categorical`: another draw on each rank and row."""
    monkeypatch.setenv("KERAS_DIST_TRIAL", "0")
    monkeypatch.setattr(Chooses, "seen", [])
    model = maker(Chooses, run_eagerly=True)()
    count = 4 * world.size
    x, y = data_for(VECTOR)
    x, y = np.resize(x, (count, *VECTOR)), np.resize(y, (count, 1))
    keras_dist.dist_fit(model, x, y, batch="global", batch_size=count, verbose=0)
    everyone = np.concatenate(keras_dist.gather(Chooses.seen[-1]))
    assert len(set(everyone[:, 0].tolist())) > world.size
    assert len(set(everyone[:, 1].tolist())) == count
