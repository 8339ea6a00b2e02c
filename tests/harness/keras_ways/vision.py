"""Pictures: several targets, layers that are frozen and thawed, files in folders."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from harness.keras_ways.data import floats, integers
from harness.keras_ways.way import ROWS, Registry
from harness.models import update

VISION = Registry("vision")


@VISION.way("ConvLSTM: the next pictures of a film")
def conv_lstm(run):
    inputs = keras.Input((None, 5, 5, 1))
    x = keras.layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True)(inputs)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Conv3D(1, 3, activation="sigmoid", padding="same")(x)
    model = keras.Model(inputs, x)
    run.compile(model, keras.optimizers.Adam(0.01), "binary_crossentropy")
    films = 1 / (1 + np.exp(-floats(4, 5, 5, 1)))
    return model, run.fit(model, films[:, :-1], films[:, 1:])


@VISION.way("object detection: dicts of boxes and classes", is_traced=True)
def detection(run):
    inputs = keras.Input((6, 6, 3))
    x = keras.layers.Conv2D(3, 3, activation="relu")(inputs)
    x = keras.layers.Flatten()(x)
    outputs = {
        "boxes": keras.layers.Dense(4)(x),
        "classes": keras.layers.Dense(3, activation="softmax")(x),
    }
    model = keras.Model(inputs, outputs)
    run.compile(
        model,
        keras.optimizers.Adam(0.01),
        loss={"boxes": "huber", "classes": "sparse_categorical_crossentropy"},
        loss_weights={"boxes": 2.0, "classes": 0.5},
        metrics={"classes": ["accuracy"], "boxes": ["mae"]},
    )
    # In a graph Keras logs the loss of each output as a mean of the batches, whatever
    # their sizes: here all are equal.
    x = floats(6, 6, 3, rows=24)
    y = {"boxes": floats(4, rows=24), "classes": np.arange(24) % 3}
    data = run.batches(x, y)
    return model, run.fit(model, data, validation_data=data)


class AnchorLoss(keras.losses.Loss):
    """Focal and box loss of the anchors of a picture, by how many are positive."""

    def call(self, y_true, y_pred):
        positive = ops.cast(y_true[..., 4] > 0, y_pred.dtype)
        gap = ops.mean(ops.square(y_true[..., :4] - y_pred[..., :4]), axis=-1)
        chance = ops.sigmoid(y_pred[..., 4])
        right = ops.where(positive > 0, chance, 1 - chance)
        focal = -ops.square(1 - right) * ops.log(right)
        count = ops.maximum(ops.sum(positive, axis=-1), 1)
        return ops.sum(focal + positive * gap, axis=-1) / count


@VISION.way("object detection: a loss of all anchors")
def anchors(run):
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(5, 3, strides=2, padding="same"),
            keras.layers.Reshape((9, 5)),
        ]
    )
    run.compile(model, keras.optimizers.SGD(0.05, momentum=0.9), AnchorLoss())
    return model, run.fit(model, floats(6, 6, 1), floats(9, 5, seed=1))


@VISION.way("segmentation: a class for each pixel, up and down again")
def segmentation(run):
    inputs = keras.Input((6, 6, 1))
    down = keras.layers.Conv2D(3, 3, strides=2, padding="same")(inputs)
    x = keras.layers.SeparableConv2D(4, 3, padding="same", activation="relu")(down)
    x = keras.layers.add([x, keras.layers.Conv2D(4, 1)(down)])
    x = keras.layers.UpSampling2D(2)(x)
    outputs = keras.layers.Conv2D(3, 3, activation="softmax", padding="same")(x)
    model = keras.Model(inputs, outputs)
    run.compile(model, keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model, run.fit(model, floats(6, 6, 1), integers(3, 6, 6, 1))


class Patches(keras.layers.Layer):
    """Cuts pictures into patches, and adds a trained vector for each position."""

    def build(self, shape):
        self.project = keras.layers.Dense(4)
        self.positions = self.add_weight(shape=(4, 4), name="positions")

    def call(self, x):
        patches = ops.image.extract_patches(x, (3, 3))
        patches = ops.reshape(patches, (-1, 4, 9))
        return self.project(patches) + self.positions


@VISION.way("vision transformer of patches")
def vision_transformer(run):
    inputs = keras.Input((6, 6, 1))
    x = Patches()(inputs)
    found = keras.layers.LayerNormalization(epsilon=1e-3)(x)
    x = x + keras.layers.MultiHeadAttention(2, 2)(found, found)
    x = keras.layers.Flatten()(keras.layers.LayerNormalization(epsilon=1e-3)(x))
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    optimizer = keras.optimizers.AdamW(0.01, clipnorm=1.0, epsilon=1e-3)
    run.compile(model, optimizer, loss, metrics=["accuracy"])
    y = keras.utils.to_categorical(integers(3), 3)
    return model, run.fit(model, floats(6, 6, 1), y)


def _backbone():
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(3, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    model.layers[1].moving_mean.assign([0.1, -0.2, 0.3])
    return model


@VISION.way("transfer learning: frozen, then thawed and compiled again")
def transfer_learning(run):
    backbone = _backbone()
    backbone.trainable = False
    inputs = keras.Input((6, 6, 1))
    x = keras.layers.Rescaling(1 / 2.0, offset=0.1)(inputs)
    outputs = keras.layers.Dense(1)(backbone(x, training=False))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    x, y = floats(6, 6, 1), integers(2)
    given = {"validation_data": (x[:9], y[:9])}
    run.compile(model, keras.optimizers.Adam(0.01), loss, metrics=["binary_accuracy"])
    first = run.fit(model, x, y, **given)
    backbone.trainable = True
    backbone.layers[1].trainable = False  # as of the guides; else it normalizes by rank
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    run.compile(model, optimizer, loss, metrics=["binary_accuracy"])
    second = run.fit(model, x, y, **given)
    backbone.layers[0].trainable = False
    run.compile(model, keras.optimizers.SGD(0.01), loss)
    return model, first, second, run.fit(model, x, y)


@VISION.way("a frozen BatchNormalization in a model that trains", is_traced=True)
def frozen_normalization(run):
    backbone = _backbone()
    backbone.layers[1].trainable = False
    model = keras.Sequential([backbone, keras.layers.Dense(1)])
    run.compile(model, keras.optimizers.RMSprop(0.01), "mse")
    return model, run.fit(model, floats(6, 6, 1), floats(1, seed=1))


@VISION.way("weights of one model loaded into the layers of another one")
def loaded_weights(run):
    model = keras.Sequential([_backbone(), keras.layers.Dense(2)])
    model.layers[0].layers[1].trainable = False
    run.compile(model, keras.optimizers.SGD(0.1), "mse")
    x = floats(6, 6, 1)
    first = run.fit(model, x, floats(2, seed=1))
    path = str(run.folder / f"{keras.config.floatx()}.weights.h5")
    model.layers[0].save_weights(path)
    other = keras.Sequential([_backbone(), keras.layers.Dense(1)])
    other.layers[0].load_weights(path)
    other.layers[0].trainable = False
    run.compile(other, keras.optimizers.SGD(0.1), "mse")
    return model, other, first, run.fit(other, x, floats(seed=2))


@VISION.way("pictures from image_dataset_from_directory")
def pictures_of_folder(run):
    with tempfile.TemporaryDirectory() as folder:
        pixels = np.random.default_rng(0).integers(0, 255, size=(ROWS + 6, 8, 8, 3))
        for index, picture in enumerate(pixels):
            path = Path(folder) / "ab"[index % 2]
            path.mkdir(exist_ok=True)
            keras.utils.save_img(str(path / f"{index:02}.png"), picture, scale=False)
        train, validation = keras.utils.image_dataset_from_directory(
            folder,
            validation_split=6 / (ROWS + 6),
            subset="both",
            shuffle=False,
            image_size=(6, 6),
            batch_size=run.batch_size,
            verbose=False,
        )
        model = keras.Sequential(
            [
                keras.Input((6, 6, 3)),
                keras.layers.Rescaling(1 / 255),
                keras.layers.Conv2D(2, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
        run.compile(model, optimizer, "binary_crossentropy", metrics=["accuracy"])
        train = train.map(lambda x, y: (x / 2, y)).cache().prefetch(2)
        return model, run.fit(model, train, epochs=2, validation_data=validation)


@VISION.way("films: a picture network for each time, padded to one length")
def films(run):
    x = floats(4, 3)
    lengths = 1 + np.arange(ROWS) % 4
    mask = np.arange(4)[None, :] < lengths[:, None]
    inputs, masks = keras.Input((4, 3)), keras.Input((4,), dtype="bool")
    found = keras.layers.TimeDistributed(keras.layers.Dense(3, "relu"))(inputs)
    found = keras.layers.GRU(3)(found, mask=masks)
    model = keras.Model([inputs, masks], keras.layers.Dense(2, "softmax")(found))
    optimizer = keras.optimizers.Adam(0.01)
    run.compile(model, optimizer, "sparse_categorical_crossentropy")
    return model, run.fit(model, [x, mask], integers(2), validation_split=0.09)


class Gradual(keras.Model):
    """A second output trains the same layers, by weights of its own optimizer."""

    def __init__(self):
        super().__init__()
        self.trunk = keras.layers.Dense(4, activation="tanh")
        self.heads = [keras.layers.Dense(1), keras.layers.Dense(3)]

    def call(self, x):
        x = self.trunk(x)
        return [head(x) for head in self.heads]

    def train_step(self, data):
        x, (number, label) = data
        cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            guess, scores = self(x, training=True)
            losses = [keras.losses.MeanSquaredError()(number, guess)]
            losses += [cross(label, scores)]
            total = losses[0] + 0.3 * losses[1]
        update(tape, total, self.optimizer, self)
        return {"loss": total, "number": losses[0], "label": losses[1]}


@VISION.way("two tasks, one train step, a tuple of targets")
def two_tasks(run):
    model = run.compile(Gradual(), keras.optimizers.Nadam(0.01))
    return model, run.fit(
        model, run.batches(floats(5), (floats(1, seed=1), integers(3)))
    )
