"""One rank of `make slow-network`.

Arguments: `sync`, `outer_momentum`, epochs, rows of an epoch, seed.
"""

import json
import os
import statistics
import sys
import time

import common
import keras
import keras_models

import keras_dist

sync, momentum, epochs, rows, seed = sys.argv[1], *map(float, sys.argv[2:])
world = keras_dist.init()
keras.utils.set_random_seed(int(seed))
model = keras_models.make(keras, "cnn")
optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
model.compile(**keras_models.compile_arguments(optimizer))
(x, y), (x_test, y_test) = common.images(), common.images("t10k")
times = []


class Times(keras.callbacks.Callback):
    """Times the epochs, without what comes after them."""

    def on_epoch_begin(self, epoch, logs=None):
        times.append(-time.perf_counter())

    def on_epoch_end(self, epoch, logs=None):
        times[-1] += time.perf_counter()


keras_dist.dist_fit(
    model,
    x[: int(rows)],
    y[: int(rows)],
    batch_size=common.BATCH_SIZE,
    epochs=int(epochs),
    verbose=0,
    callbacks=[Times()],
    sync=sync,
    outer_momentum=momentum,
)
_, accuracy = model.evaluate(x_test, y_test, batch_size=500, verbose=0)
print("measured: " + json.dumps([statistics.median(times[1:]), accuracy]), flush=True)
keras_dist.gather("done")
os._exit(0)
