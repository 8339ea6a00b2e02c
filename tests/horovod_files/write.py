"""Write small models with Keras 2, for `test_horovod_files.py`; `make recordings` does.

    TF_USE_LEGACY_KERAS=1 python write.py FOLDER

Each file is a whole model after some steps, compressed. `expected.json` has what Keras
2 itself does with it on one process: the predictions, and the weights after two more
steps.
"""

import gzip
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()  # one rank: the optimizers of the last two models are Horovod's
keras = tf.keras


def rows():
    """Rows and targets."""
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (16, 4)).astype("float32")
    return x, (x @ random.uniform(-1, 1, (4, 1))).astype("float32")


def sequential():
    """Layers one after the other."""
    return keras.Sequential(
        [
            keras.layers.Dense(3, activation="tanh", input_shape=(4,)),
            keras.layers.Dense(1),
        ]
    )


def functional():
    """A graph of layers, with normalization and dropout."""
    inputs = keras.Input((4,), name="rows")
    hidden = keras.layers.Dense(3, activation="relu", name="hidden")(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Dropout(0.0)(hidden)
    hidden = keras.layers.Concatenate()([hidden, inputs])
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(hidden))


def images():
    """Convolution, pooling, flattening."""
    return keras.Sequential(
        [
            keras.layers.Reshape((2, 2, 1), input_shape=(4,)),
            keras.layers.Conv2D(2, 2, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


legacy = keras.optimizers.legacy

# Model, optimizer, further arguments of `compile`.
MODELS = {
    "sgd": (sequential, keras.optimizers.SGD(0.05), {"loss": "mse"}),
    "momentum": (
        sequential,
        keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        {"loss": "mse", "metrics": ["mae"]},
    ),
    "adam": (
        functional,
        keras.optimizers.Adam(0.01),
        {"loss": keras.losses.MeanSquaredError(), "metrics": ["mae"]},
    ),
    "rmsprop": (
        images,
        keras.optimizers.RMSprop(0.01),
        {"loss": "mean_squared_error", "metrics": [keras.metrics.MeanSquaredError()]},
    ),
    "adadelta": (sequential, keras.optimizers.Adadelta(1.0), {"loss": "mse"}),
    "legacy_sgd": (
        sequential,
        legacy.SGD(0.05, momentum=0.9),
        {"loss": "mse"},
    ),
    "legacy_adam": (sequential, legacy.Adam(0.01), {"loss": "mse"}),
    "legacy_decay": (
        sequential,
        legacy.SGD(0.05, decay=0.1),
        {"loss": "mse"},
    ),
    "horovod_adam": (
        sequential,
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
        {"loss": "mse", "metrics": ["mae"]},
    ),
    "horovod_legacy": (
        functional,
        hvd.DistributedOptimizer(legacy.SGD(0.05, momentum=0.9)),
        {"loss": "mse", "experimental_run_tf_function": False},
    ),
}


def main(folder):
    """Write all of them."""
    folder = Path(folder)
    x, y = rows()
    expected = {}
    for name, (make, optimizer, options) in MODELS.items():
        keras.utils.set_random_seed(1)
        model = make()
        model.compile(optimizer, **options)
        fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
        model.fit(x, y, epochs=2, **fit)
        model.save(folder / "model.h5")
        text = gzip.compress((folder / "model.h5").read_bytes(), mtime=0)
        (folder / f"{name}.h5.gz").write_bytes(text)
        (folder / "model.h5").unlink()
        expected[name] = {"predictions": model.predict(x, verbose=0).tolist()}
        model.fit(x, y, epochs=1, **fit)
        expected[name]["weights"] = [w.tolist() for w in model.get_weights()]
        expected[name]["rate"] = float(model.optimizer.learning_rate)
        expected[name]["iterations"] = int(model.optimizer.iterations)
    lines = [f"{json.dumps(name)}: {json.dumps(expected[name])}" for name in expected]
    (folder / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
