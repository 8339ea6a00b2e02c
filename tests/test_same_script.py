"""The promise, literally: a script of plain Keras whose `fit` alone is replaced."""

import keras
import numpy as np
import pytest
from harness.launching import PYTHONPATH, launch, write_script

SCRIPT = """
import os
import sys

import keras
import numpy as np
import tensorflow as tf

keras.config.set_floatx("float64")
folder = sys.argv[1]


def rows(count, seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 5))
    noise = generator.normal(size=count)
    return x, (x.sum(axis=1) + noise > 0).astype("float64")[:, None]


def compiled(optimizer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.F1Score(threshold=0.5)]
    model.compile(optimizer, "binary_crossentropy", metrics=metrics)
    return model


def left(model, history):
    logs = {k: v for k, v in history.history.items() if k != "rows_per_second"}
    states = model.get_weights() + [v.numpy() for v in model.optimizer.variables]
    return states + [np.ravel(logs[name]) for name in sorted(logs)]


x, y = rows(97, 0)
stopping = keras.callbacks.EarlyStopping("val_auc", mode="max", patience=2)
plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=0, min_delta=0.02)
files = keras.callbacks.ModelCheckpoint(folder + "/{epoch}.keras")
model = compiled(keras.optimizers.Adam(0.05, global_clipnorm=0.5))
history = model.fit(
    x, y, batch_size=24, epochs=12, validation_data=rows(33, 1),
    callbacks=[stopping, plateau, files], verbose=0
)
results = left(model, history) + [np.array(stopping.stopped_epoch)]

data = tf.data.Dataset.from_tensor_slices(rows(97, 2)).shuffle(97, seed=4).batch(24)
schedule = keras.optimizers.schedules.CosineDecay(0.1, 15)
model = compiled(keras.optimizers.Adam(schedule, clipvalue=0.1))
keras.utils.set_random_seed(5)
history = model.fit(
    data, epochs=3, validation_data=rows(33, 1), validation_batch_size=8, verbose=0
)
results += left(model, history)
np.savez(f"{folder}/{os.environ.get('HOROVOD_RANK', 'plain')}.npz", *results)
"""

# All that a user changes.
CHANGES = (
    ("import keras\n", "import keras\nimport keras_dist\n"),
    ("model.fit(", "keras_dist.dist_fit(model, "),
    ("verbose=0\n", 'verbose=0, batch="global"\n'),
)


def trained(folder, ranks):
    """What the script leaves on each rank, and what it has saved."""
    folder.mkdir()
    text = SCRIPT
    for before, after in CHANGES if ranks else ():
        assert before in text
        text = text.replace(before, after)
    env = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    launch([write_script(folder, text), folder], ranks=ranks, env=env, check=True)
    results = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            results.append([arrays[f"arr_{i}"] for i in range(len(arrays))])
    assert len(results) == (ranks or 1)
    return results, sorted(path.name for path in folder.glob("*.keras"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What plain Keras makes of it, and where its files are."""
    folder = tmp_path_factory.mktemp("plain") / "0"
    [results], saved = trained(folder, None)
    return results, saved, folder


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 2, 4))]
)
def test_the_number_of_ranks_changes_no_number(plain, tmp_path, ranks):
    """97 rows in batches of 24: the last one has one row, for one of the ranks."""
    expected, saved, folder = plain
    own = tmp_path / str(ranks)
    results, own_saved = trained(own, ranks)
    assert own_saved == saved and len(saved) > 2
    models = [keras.models.load_model(at / saved[-1]) for at in (own, folder)]
    for found in results:
        assert_equal(found, expected)
    assert_equal(*(model.get_weights() for model in models))


def assert_equal(found, expected):
    """Equal to rounding in float64."""
    assert len(found) == len(expected)
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-10, atol=1e-10)
