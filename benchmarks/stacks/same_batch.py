"""Keras 3 with one global batch of 256 rows, however many devices share it.

Methods: "keras_dist" on its ranks by `batch="global"`; and in one process "one", plain
`model.fit`; "mirrored", `MirroredStrategy` on two logical devices; "jax",
`keras.distribution` on two devices of JAX, which compiles the step by XLA.
"""

import contextlib
import os
import sys

import common

arguments = common.arguments("keras_dist", "one", "mirrored", "jax")
IS_JAX = arguments.method == "jax"
if IS_JAX:
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import keras  # noqa: E402 - its backend is chosen above
import keras_models  # noqa: E402

BATCH_SIZE = 2 * common.BATCH_SIZE

scope, fit = contextlib.nullcontext, keras.Model.fit
if arguments.method == "keras_dist":
    import keras_dist

    keras_dist.init()

    def fit(model, *data, **options):
        """All ranks together."""
        return keras_dist.dist_fit(model, *data, batch="global", **options)


if arguments.method == "mirrored":
    import tensorflow as tf

    [device] = tf.config.list_physical_devices("CPU")
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(device, halves)
    scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope
if IS_JAX:
    keras.distribution.set_distribution(keras.distribution.DataParallel())

for name in arguments.models:
    x, y = common.rows_of(name, 2, arguments.scale)
    keras.utils.set_random_seed(0)
    with scope():
        model = keras_models.make(keras, name)
        optimizer = keras_models.optimizer(keras)
        compiled = keras_models.compile_arguments(optimizer)
        model.compile(**compiled | {"jit_compile": IS_JAX})
    clock = common.Clock("own", name, BATCH_SIZE)
    callbacks = [keras_models.clock_callback(keras, clock)]
    given = {"batch_size": BATCH_SIZE, "epochs": common.EPOCHS, "verbose": 0}
    fit(model, x, y, callbacks=callbacks, **given)
    clock.report()
sys.stdout.flush()
os._exit(0)
