"""What one rank reports of its device: equality with one process, speed and memory.

    keras-dist run benchmarks/stacks/gpu_rank.py VARIANT

Variants: "float32", "xla", "mixed_float16", "mixed_bfloat16".
"""

import ctypes
import json
import os
import re
import resource
import sys
import time
from pathlib import Path

import keras
import keras_models
import numpy as np
import tensorflow as tf

import keras_dist
from keras_dist.comm import transport_name

BATCH_SIZE, ROUNDS = 128, 3
variant = sys.argv[1]
world = keras_dist.init()
gpus = tf.config.get_visible_devices("GPU")
STEPS = 20 if gpus else 5
tf.config.experimental.enable_tensor_float_32_execution(False)  # rounds to ten bits
if variant.startswith("mixed"):
    keras.config.set_dtype_policy(variant)


def make():
    """A small convolutional network."""
    keras.utils.set_random_seed(0)
    model = keras_models.make(keras, "cnn")
    compiled = keras_models.compile_arguments(keras_models.optimizer(keras))
    model.compile(**compiled | {"jit_compile": variant == "xla"})
    return model


def data(rows):
    """Random images and labels."""
    generator = np.random.default_rng(0)
    return generator.random((rows, 28, 28, 1), np.float32), generator.integers(
        9, size=rows
    )


def difference():
    """The largest one of a weight to plain Keras, relative to its tensor's largest."""
    fit = {"batch_size": BATCH_SIZE, "epochs": 2, "shuffle": False, "verbose": 0}
    x, y = data(5 * BATCH_SIZE + 7)
    model = make()
    keras_dist.dist_fit(model, x, y, batch="global", **fit)
    expected = None
    if world.rank == 0:
        alone = make()
        alone.fit(x, y, **fit)
        expected = alone.get_weights()
    pairs = zip(model.get_weights(), keras_dist.broadcast(expected), strict=True)
    return max(float(np.max(abs(a - b)) / np.max(abs(b))) for a, b in pairs)


def rates():
    """Rows per second of all ranks by `dist_fit`, and of plain Keras beside it."""
    x, y = data(BATCH_SIZE * STEPS * world.size)
    own = x[world.rank :: world.size], y[world.rank :: world.size]
    models, seconds = (make(), make()), ([], [])
    for _ in range(ROUNDS + 1):  # the first one traces
        for model, found, is_ours in zip(models, seconds, (True, False), strict=True):
            keras_dist.gather("ready")
            begin = time.perf_counter()
            given = (x, y) if is_ours else own
            fit = keras_dist.dist_fit if is_ours else keras.Model.fit
            fit(model, *given, batch_size=BATCH_SIZE, verbose=0)
            found.append(time.perf_counter() - begin)
    slowest = [np.max(keras_dist.gather(found[1:]), axis=0) for found in seconds]
    return [float(len(x) / np.median(each)) for each in slowest]


def nccl():
    """Version and path of the NCCL that this process has loaded; empty if none."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"\S*/libnccl\.so\S*", maps)
    if not found:
        return ""
    number = ctypes.c_int()
    ctypes.CDLL(found[0]).ncclGetVersion(ctypes.byref(number))
    return f"{number.value} in {found[0]}"


def memory():
    """Largest memory of the device, or of the process without a GPU, in MiB."""
    if gpus:
        return tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
gap = difference()
ours, ceiling = rates()
line = {
    "device": details.get("device_name", "no GPU"),
    "capability": details.get("compute_capability", ""),
    "transport": transport_name(),
    "difference": gap,
    "rows_per_second": ours,
    "share": ours / ceiling,
    "memory": memory(),
    "nccl": nccl(),
}
sys.stdout.write(f"measured: {json.dumps(line)}\n")
sys.stdout.flush()
keras_dist.gather("done")
os._exit(0)
