"""Milliseconds of one allreduce in a graph, by its size.

    keras-dist run -np 2 python benchmarks/stacks/allreduce.py

First on idle cores; then beside as many busy processes as there are cores.
"""

import os
import subprocess
import sys
import time

import common
import numpy as np
import tensorflow as tf

import keras_dist
import keras_dist.horovod as hvd

# KiB of a tensor, and how often it is sent.
SIZES = {1: 200, 64: 200, 1024: 50, 16 * 1024: 8, 64 * 1024: 4}

world = keras_dist.init()


def milliseconds(kib: int, times: int) -> float:
    """Median of the slowest rank's times of one allreduce."""
    tensor = tf.zeros([kib * 256])

    @tf.function
    def send(tensor):
        return hvd.allreduce(tensor, op=hvd.Sum, name=f"sum of {kib} KiB")

    send(tensor)
    seconds = []
    for _ in range(times):
        keras_dist.gather(None)
        begun = time.perf_counter()
        send(tensor).numpy()
        seconds.append(time.perf_counter() - begun)
    everyone = np.array(keras_dist.gather(seconds))
    return float(np.median(everyone.max(axis=0))) * 1e3


idle = {kib: milliseconds(kib, times) for kib, times in SIZES.items()}
busy = []
if world.rank == 0:
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in os.sched_getaffinity(0)]
try:
    beside = {kib: milliseconds(kib, max(4, n // 4)) for kib, n in SIZES.items()}
finally:
    for process in busy:
        process.kill()
if world.rank == 0:
    sys.stdout.write(common.mark({"idle": idle, "beside": beside}))
    sys.stdout.flush()
keras_dist.gather("done")
os._exit(0)
