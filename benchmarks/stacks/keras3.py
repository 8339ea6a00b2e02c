"""Keras 3: `dist_fit`, or plain `model.fit` on each process without averaging.

Methods: "both", `dist_fit` and beside it its ceiling, plain `model.fit` on this rank's
part of the rows, epoch by epoch in turn; "keras_dist" or "alone", one of them.
"""

import os
import sys

import common
import keras
import keras_models

import keras_dist

arguments = common.arguments("both", "keras_dist", "alone")
world = keras_dist.init()
for name in arguments.models:
    x, y = common.rows_of(name, world.size, arguments.scale)
    own = x[world.rank :: world.size], y[world.rank :: world.size]
    rows = common.BATCH_SIZE * world.size
    keras.utils.set_random_seed(0)
    model = keras_models.make(keras, name)
    optimizer = keras_models.optimizer(keras)
    model.compile(**keras_models.compile_arguments(optimizer))
    twin = None
    if arguments.method == "both":
        twin = keras_models.Twin(
            keras, name, rows, own, common.BATCH_SIZE, lambda: keras_dist.gather("")
        )
    keras_dist.gather("ready")
    clock = common.Clock("own", name, rows)
    after = twin.turn if twin else None
    fit = {
        "batch_size": common.BATCH_SIZE,
        "epochs": common.EPOCHS,
        "callbacks": [keras_models.clock_callback(keras, clock, after)],
        "verbose": 0,
    }
    if arguments.batch_norm:
        fit["batch_norm"] = arguments.batch_norm
    if arguments.method == "alone":
        model.fit(*own, **fit)
    else:
        keras_dist.dist_fit(model, x, y, **fit)
    clock.report()
    if twin:
        twin.clock.report()
    keras_dist.gather("done")
sys.stdout.flush()
os._exit(0)  # nothing is left to do, and TensorFlow takes seconds to end
