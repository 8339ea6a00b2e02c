"""Layers of Keras that draw random numbers for each row of a batch alone."""

from functools import partial

import keras
from keras import layers

from harness.keras_ways.data import floats
from harness.keras_ways.way import Registry

NOISE = Registry("random numbers", is_traced=True)

VECTOR, SEQUENCE, PICTURE = (8,), (5, 4), (6, 6, 3)

RANGE = {"value_range": (0, 1)}

# The shape of a row, and the layer, by the name of the way.
LAYERS = {
    "Dropout": (VECTOR, partial(layers.Dropout, 0.5)),
    "AlphaDropout": (VECTOR, partial(layers.AlphaDropout, 0.3)),
    "GaussianDropout": (VECTOR, partial(layers.GaussianDropout, 0.3)),
    "GaussianNoise": (VECTOR, partial(layers.GaussianNoise, 0.5)),
    "SpatialDropout1D": (SEQUENCE, partial(layers.SpatialDropout1D, 0.4)),
    "SpatialDropout2D": (PICTURE, partial(layers.SpatialDropout2D, 0.4)),
    "Dropout at each time": (
        SEQUENCE,
        lambda: layers.TimeDistributed(layers.Dropout(0.5)),
    ),
    "LSTM": (SEQUENCE, partial(layers.LSTM, 3, dropout=0.3, recurrent_dropout=0.2)),
    "AugMix": (PICTURE, partial(layers.AugMix, **RANGE)),
    "RandomBrightness": (PICTURE, partial(layers.RandomBrightness, 0.3)),
    "RandomColorDegeneration": (PICTURE, partial(layers.RandomColorDegeneration, 0.5)),
    "RandomColorJitter": (
        PICTURE,
        partial(layers.RandomColorJitter, (0, 1), 0.3, 0.3, 0.3, 0.3),
    ),
    "RandomContrast": (PICTURE, partial(layers.RandomContrast, 0.3)),
    "RandomCrop": (PICTURE, partial(layers.RandomCrop, 4, 4)),
    "RandomErasing": (PICTURE, partial(layers.RandomErasing, **RANGE)),
    "RandomFlip": (PICTURE, layers.RandomFlip),
    "RandomGaussianBlur": (PICTURE, partial(layers.RandomGaussianBlur, 0.9)),
    "RandomGrayscale": (PICTURE, partial(layers.RandomGrayscale, 0.5)),
    "RandomHue": (PICTURE, partial(layers.RandomHue, 0.5, **RANGE)),
    "RandomInvert": (PICTURE, partial(layers.RandomInvert, 0.5, **RANGE)),
    "RandomPerspective": (PICTURE, partial(layers.RandomPerspective, 0.5)),
    "RandomPosterization": (PICTURE, partial(layers.RandomPosterization, 4, **RANGE)),
    "RandomRotation": (PICTURE, partial(layers.RandomRotation, 0.3)),
    "RandomSaturation": (PICTURE, partial(layers.RandomSaturation, 0.5, **RANGE)),
    "RandomSharpness": (PICTURE, partial(layers.RandomSharpness, 0.5, **RANGE)),
    "RandomShear": (PICTURE, partial(layers.RandomShear, 0.3, 0.3)),
    "RandomTranslation": (PICTURE, partial(layers.RandomTranslation, 0.2, 0.2)),
    "RandomZoom": (PICTURE, partial(layers.RandomZoom, 0.3)),
}

# Keras computes a part of these in float32, and fails in a model of float64.
IN_FLOAT32 = "AugMix", "RandomPerspective", "RandomRotation"

GROUPS = (
    ("Dropout", "AlphaDropout", "GaussianDropout", "GaussianNoise", "SpatialDropout2D"),
    ("SpatialDropout1D", "Dropout at each time", "LSTM"),
    ("RandomCrop", "RandomFlip", "RandomShear", "RandomTranslation", "RandomZoom"),
    IN_FLOAT32,
)
COLORS = tuple(name for name in LAYERS if name not in {n for g in GROUPS for n in g})


def train_with(names, run):
    """Models of one random layer and a dense one."""
    found = []
    for name in names:
        shape, make = LAYERS[name]
        network = [keras.Input(shape), make(), layers.Flatten(), layers.Dense(1)]
        model = keras.Sequential(network)
        run.compile(model, keras.optimizers.SGD(0.05), "mse")
        x = abs(floats(*shape)) % 1
        y = x.reshape(len(x), -1)[:, :1]
        found.append((model, run.fit(model, x, y, epochs=3)))
    return found


for group in (*GROUPS, COLORS):
    dtype = "float32" if group == IN_FLOAT32 else "float64"
    NOISE.way(", ".join(group), dtype=dtype)(partial(train_with, group))
