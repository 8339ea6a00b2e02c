"""Which layers and losses of Keras treat each row of a batch alone.

All others are tried on the first batch. One process; no ranks.
"""

import inspect
import re

import keras
import numpy as np
import pytest
from keras import layers

from keras_dist.training import losses

RANDOM = np.random.default_rng(0)
ROWS = 3

# Inputs by the number of dimensions in the name of a layer; 0 for none.
SHAPES = {0: (6, 4), 1: (6, 4), 2: (8, 8, 3), 3: (6, 6, 6, 2)}

# The arguments that a layer needs, by its name without dimensions.
ARGUMENTS = {
    "Activation": ("relu",),
    "AdaptiveAveragePooling": (2,),
    "AdaptiveMaxPooling": (2,),
    "AveragePooling": (2,),
    "MaxPooling": (2,),
    "Bidirectional": (lambda: layers.LSTM(2),),
    "CenterCrop": (4, 4),
    "Conv": (2, 3),
    "ConvLSTM": (2, 2),
    "ConvTranspose": (2, 3),
    "Dense": (2,),
    "DepthwiseConv": (3,),
    "Dot": (2,),
    "EinsumDense": ("abc,cd->abd", (None, 2)),
    "Embedding": (9, 2),
    "GRU": (2,),
    "GroupNormalization": (2,),
    "GroupedQueryAttention": (2, 2, 1),
    "LSTM": (2,),
    "MultiHeadAttention": (2, 2),
    "Pipeline": (lambda: [layers.Rescaling(2.0)],),
    "Permute": ((2, 1),),
    "RNN": (lambda: layers.StackedRNNCells([layers.GRUCell(2), layers.LSTMCell(2)]),),
    "RandomCrop": (4, 4),
    "RepeatVector": (2,),
    "Rescaling": (2.0,),
    "Reshape": ((-1,),),
    "Resizing": (4, 4),
    "ReversibleEmbedding": (9, 2),
    "SeparableConv": (2, 3),
    "SimpleRNN": (2,),
    "SpectralNormalization": (lambda: layers.Dense(2),),
    "STFTSpectrogram": ("log", 8, 4, 8),
    "TimeDistributed": (lambda: layers.Dense(2),),
}
RATES = ("Dropout", "GaussianDropout", "GaussianNoise", "AlphaDropout")
FACTORS = "Brightness ColorDegeneration Contrast GaussianBlur Hue Invert Perspective "
FACTORS += "Rotation Saturation Sharpness Zoom"

# Cells, which `RNN` calls; what has no output of its own; and what has no fixed input.
NOT_CALLED = {"GRUCell", "LSTMCell", "SimpleRNNCell", "StackedRNNCells", "InputLayer"}
NOT_CALLED |= {"MaxNumBoundingBoxes", "BatchNormalization"}

# What needs other values for images, or one number for each row.
FLAT = {"RepeatVector": (4,), "STFTSpectrogram": (40, 1)}
IMAGES = "AutoContrast CenterCrop Resizing Solarization Pipeline "
IMAGES += "ContrastLimitedAdaptiveHistogramEqualization"
PAIRS = "Add AdditiveAttention Attention Average Concatenate Dot Maximum Minimum "
PAIRS += "Multiply Subtract"
TWICE = {"MultiHeadAttention", "GroupedQueryAttention"}


def name_without_dimensions(cls):
    """As the package compares it."""
    return re.sub("[123]D", "", cls.__name__)


CLASSES = {
    cls.__name__: cls
    for cls in vars(layers).values()
    if inspect.isclass(cls) and issubclass(cls, layers.Layer)
}
ALONE = {
    name: cls
    for name, cls in CLASSES.items()
    if name_without_dimensions(cls) in losses.BY_ROW_LAYERS
}


def make(cls):
    """A layer with small arguments."""
    kind = name_without_dimensions(cls)
    given = ARGUMENTS.get(kind, ())
    if kind in RATES or kind.startswith("SpatialDropout"):
        given = (0.5,)
    if kind.removeprefix("Random") in FACTORS.split():
        given = (0.5,)
    if kind == "RandomPosterization":
        given = (4,)
    if kind == "RandomColorJitter":
        given = ((0, 255), 0.5, 0.5, 0.5, 0.5)
    if kind == "RandomTranslation":
        given = (0.3, 0.3)
    if kind == "Normalization":
        return cls(mean=0.5, variance=2.0)
    return cls(*(each() if callable(each) else each for each in given))


def call(cls, x):
    """The output of a new layer, of random numbers that are the same each time."""
    keras.utils.set_random_seed(1)
    layer, kind = make(cls), name_without_dimensions(cls)
    assert losses.is_by_row(layer)
    if kind in PAIRS.split():
        return layer([x, x[:, ::-1] * 0.5])
    if kind in TWICE:
        return layer(x, x)
    training = "training" in inspect.signature(layer.call).parameters
    return layer(x, **{"training": True} if training else {})


@pytest.mark.parametrize("name", sorted(ALONE))
def test_a_listed_layer_treats_each_row_alone(name):
    """The first row's output is the same beside other rows, in training, too."""
    cls, kind = ALONE[name], name_without_dimensions(ALONE[name])
    if kind in NOT_CALLED:
        return
    found = re.search("([123])D", name)
    shape = SHAPES[int(found[1]) if found else 0]
    if kind in IMAGES.split() or kind.startswith("Random"):
        shape = SHAPES[2]
    shape = FLAT.get(kind, shape)
    if kind.startswith("ConvLSTM"):
        shape = (2, *SHAPES[int(found[1])])
    x, other = RANDOM.uniform(0, 255, (2, ROWS, *shape)).astype("float32")
    if "Embedding" in name:
        x, other = RANDOM.integers(0, 9, (2, ROWS, 5))
    other[0] = x[0]
    outputs = [np.array(call(cls, rows))[0] for rows in (x, other)]
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-4)


def test_all_other_layers_are_tried():
    """A new layer of Keras is, too, until somebody has added it to the list."""
    for name, others in {
        "Lambda": (lambda x: x,),
        "MelSpectrogram": (),
        "Equalization": (),
        "MixUp": (),
        "CutMix": (),
        "RandAugment": (),
        "CategoryEncoding": (9,),
        "TextVectorization": (9,),
    }.items():
        assert not losses.is_by_row(CLASSES[name](*others))
    unknown = set(CLASSES) - set(ALONE)
    assert {"TFSMLayer", "JaxLayer", "FlaxLayer", "Wrapper"} <= unknown
    assert len(ALONE) > 100
    used = set(map(name_without_dimensions, ALONE.values()))
    inner = {"Functional", "Sequential", "ConvLSTMCell"}
    assert used | inner >= losses.BY_ROW_LAYERS


@pytest.mark.parametrize("axis", [0, [0, 1], -2, (1, -3)])
def test_a_layer_over_an_axis_that_may_be_the_rows_is_tried(axis):
    """Whatever else the list says of it."""
    for cls in (layers.Softmax, layers.UnitNormalization, layers.LayerNormalization):
        assert not losses.is_by_row(cls(axis=axis)) and losses.is_by_row(cls())
    attention = layers.MultiHeadAttention(2, 2, attention_axes=axis)
    assert not losses.is_by_row(attention)


def test_what_adds_up_an_activity_by_row_is_known():
    """A regularizer that compares rows is tried, also one of Keras."""
    kind = keras.regularizers
    for regularizer, is_known in (
        (kind.L2(), True),
        (kind.L1L2(), True),
        (kind.OrthogonalRegularizer(mode="rows"), False),
    ):
        layer = layers.Dense(2, activity_regularizer=regularizer)
        assert losses.is_by_row(layer) == is_known


LOSSES = {
    name: cls
    for name, cls in vars(keras.losses).items()
    if inspect.isclass(cls) and cls is not keras.losses.Loss
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_of_keras_is_what_it_declares(name):
    """The mean of its parts, weighted by rows; or one number of the whole batch."""
    random = np.random.default_rng(1)
    p = random.uniform(0.1, 0.9, (6, 5, 4)).astype("float32")
    y = random.integers(0, 2, (6, 5, 4)).astype("float32")
    if "Sparse" in name:
        y = random.integers(0, 4, (6, 5))
    if name == "CTC":
        y = random.integers(1, 3, (6, 2))
    if name == "CategoricalGeneralizedCrossEntropy":
        y = random.integers(0, 4, (6, 5))
    if name == "Circle":
        p, y = p[:, 0], np.array([0, 1, 0, 1, 1, 0])
    loss = LOSSES[name]()
    whole, *parts = (
        float(loss(y[rows], p[rows])) for rows in (slice(6), slice(2), slice(2, 6))
    )
    is_mean = abs(whole - (2 * parts[0] + 4 * parts[1]) / 6) < 1e-4 * abs(whole)
    assert losses.find_declared_kind(loss) == ("reduction" if is_mean else "batch")


def test_a_loss_over_the_rows_is_tried():
    """It has a value for each column."""
    for axis in (0, -2):
        loss = keras.losses.CosineSimilarity(axis=axis)
        assert losses.find_declared_kind(loss) is None
