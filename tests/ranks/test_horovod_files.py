"""`load_model` reads what Keras 2 has written; `horovod_files/write.py` wrote it."""

import gzip
import json
import os
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_dist.horovod as hvd

FOLDER = Path(__file__).parents[1] / "horovod_files"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())

# For which `make test` has time.
QUICK = ("adam", "horovod_adam", "horovod_legacy", "legacy_decay")

# On three ranks with LONG_TESTS=1.
_IS_LONG = os.environ.get("LONG_TESTS")
pytestmark = pytest.mark.three_ranks if _IS_LONG else pytest.mark.several_ranks


def rows():
    """Rows and targets, those of `write.py`."""
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (16, 4)).astype("float32")
    return x, (x @ random.uniform(-1, 1, (4, 1))).astype("float32")


def unpacked(name, folder):
    """A model as Keras 2 has written it."""
    path = folder / f"{name}.h5"
    path.write_bytes(gzip.decompress((FOLDER / f"{name}.h5.gz").read_bytes()))
    return str(path)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
        for name in EXPECTED
    ],
)
def test_a_model_of_keras_2_goes_on_as_there(name, tmp_path):
    """With the rate and the state of its optimizer; each rank has the same rows."""
    model = hvd.load_model(unpacked(name, tmp_path))
    x, y = rows()
    expected = EXPECTED[name]
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected["predictions"], rtol=1e-5, atol=1e-6)
    model.run_eagerly = True
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == expected["iterations"]
    for own, other in zip(model.get_weights(), expected["weights"], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def test_one_rank_alone_loads_a_model_of_keras_2(tmp_path):
    """The others make a model of their own, and get the weights by the broadcast."""
    x, y = rows()
    if hvd.rank() == 0:
        model = hvd.load_model(unpacked("horovod_adam", tmp_path))
    else:
        layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.run_eagerly = True
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    expected = EXPECTED["horovod_adam"]["weights"]
    for own, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
