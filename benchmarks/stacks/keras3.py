"""Keras 3: `dist_fit`, or plain `model.fit` on each process without averaging.

Ways: "keras_dist"; "alone", the ceiling, on this rank's part of the rows.
"""

import os

import common
import keras
import keras_models

import keras_dist

arguments = common.arguments("keras_dist", "alone")
world = keras_dist.init()
for name in arguments.models:
    x, y = common.rows_of(name, world.size, arguments.scale)
    keras.utils.set_random_seed(0)
    model = keras_models.make(keras, name)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(**keras_models.compile_arguments(optimizer))
    clock = common.Clock(name, len(x))
    fit = {
        "batch_size": common.BATCH_SIZE,
        "epochs": common.EPOCHS,
        "callbacks": [keras_models.clock_callback(keras, clock)],
        "verbose": 0,
    }
    keras_dist.gather("ready")
    if arguments.way == "keras_dist":
        keras_dist.dist_fit(model, x, y, **fit)
    else:
        model.fit(x[world.rank :: world.size], y[world.rank :: world.size], **fit)
    clock.tell()
    keras_dist.gather("done")
os._exit(0)  # nothing is left to do, and TensorFlow takes seconds to end
