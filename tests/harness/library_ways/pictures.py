"""Models of `keras.applications`, from a folder of pictures."""

import keras
import numpy as np

import keras_dist
from harness.keras_ways.data import integers
from harness.keras_ways.way import ROWS, Registry

PICTURES = Registry("keras.applications", is_traced=True)


def write_pictures(folder):
    """A folder for each of two classes."""
    values, labels = integers(256, 40, 40, 3).astype("uint8"), np.arange(ROWS) % 2
    for index, (value, label) in enumerate(zip(values, labels, strict=True)):
        path = folder / f"class{label}" / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(path, value)


def dataset(run):
    """The pictures, in an order that a seed gives; one rank writes them for all."""
    folder = run.folder / "pictures"
    if run.is_oracle:
        write_pictures(folder)
    else:
        with keras_dist.first_rank() as is_first:
            if is_first:
                write_pictures(folder)
    given = {"image_size": (32, 32), "batch_size": run.batch_size, "seed": 3}
    return keras.utils.image_dataset_from_directory(folder, verbose=False, **given)


def normalize(base):
    """Set the statistics of all `BatchNormalization` to the pictures'.

    As in a model that was trained; else nothing of the pictures is left in its outputs,
    and Adam makes large updates of the roundings of gradients that are zero.
    """
    for layer in base.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    pictures = integers(256, 32, 32, 3).astype(keras.config.floatx())
    base(keras.applications.mobilenet_v2.preprocess_input(pictures), training=True)


@PICTURES.way("MobileNetV2, from a folder of pictures", on_three=True)
def mobilenet(run):
    base = keras.applications.MobileNetV2(
        (32, 32, 3), alpha=0.35, include_top=False, weights=None, pooling="avg"
    )
    normalize(base)
    base.trainable = False
    inputs = keras.Input((32, 32, 3))
    x = keras.applications.mobilenet_v2.preprocess_input(inputs)
    x = base(x, training=False)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    data = dataset(run)
    return model, run.fit(model, data, epochs=2, validation_data=data)
