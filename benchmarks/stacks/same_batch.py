"""Keras 3 with one global batch of 256 rows, however many devices share it.

Methods: "keras_dist" on its ranks by `batch="global"`; "torch", `keras.distribution` on
two processes with half of the rows each; in one process "one", plain `model.fit`;
"mirrored", `MirroredStrategy`, and "jax", `keras.distribution`, on two devices.
"""

import contextlib
import os
import sys

import common

arguments = common.arguments("keras_dist", "one", "mirrored", "jax", "torch")
IS_JAX, IS_TORCH = arguments.method == "jax", arguments.method == "torch"
if IS_JAX or IS_TORCH:
    os.environ["KERAS_BACKEND"] = arguments.method
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
if IS_TORCH:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keras.distribution.initialize()
if IS_JAX or IS_TORCH:
    shards = {"auto_shard_dataset": IS_JAX}  # arrays of a process are its own part
    keras.distribution.set_distribution(keras.distribution.DataParallel(**shards))

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
    if IS_TORCH:
        rank = int(os.environ["RANK"])
        x, y, given["batch_size"] = x[rank::2], y[rank::2], common.BATCH_SIZE
    fit(model, x, y, callbacks=callbacks, **given)
    clock.report()
sys.stdout.flush()
os._exit(0)
