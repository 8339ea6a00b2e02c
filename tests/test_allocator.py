"""Steps reuse the memory of large tensors, unless the user has set malloc otherwise."""

import os
import subprocess
import sys

import pytest

# Data of a Python generator, which makes TensorFlow set malloc's threshold to 128 KiB.
_FIT = """
import resource
import keras, numpy as np, tensorflow as tf, keras_dist

def batches():
    for _ in range(10):
        yield np.ones((64, 8192), "float32"), np.ones((64, 1), "float32")

class Faults(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    def on_epoch_end(self, epoch, logs=None):
        self.found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self.before

spec = tf.TensorSpec((64, 8192)), tf.TensorSpec((64, 1))
data = tf.data.Dataset.from_generator(batches, output_signature=spec)
model = keras.Sequential([keras.Input((8192,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
faults = Faults()
keras_dist.dist_fit(model, data, epochs=4, verbose=0, callbacks=[faults])
print(faults.found)
"""

# Pages of the ten batches of an epoch, of 2 MiB each.
_PAGES = 10 * 512


@pytest.mark.parametrize(
    ("variables", "is_mapped_anew"),
    [
        ({}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=0x20000"}, True),
    ],
)
def test_a_fit_on_data_of_a_generator_maps_no_memory_anew(variables, is_mapped_anew):
    """Each batch takes memory that the batch before has left, as in plain Keras."""
    found = subprocess.run(
        [sys.executable, "-c", _FIT],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    faults = int(found.stdout.split()[-1])
    assert (faults > _PAGES) == is_mapped_anew, faults
