"""One rank of `make growth`: counts collectives and bytes, and times sums.

Arguments, in JSON: numbers of layers, sizes in bytes by name, repetitions.
"""

import json
import os
import statistics
import sys
import time
from collections import Counter

import keras
import tensorflow as tf

import keras_dist
from keras_dist import comm
from keras_dist.comm import transport

layer_counts, sizes, repetitions = map(json.loads, sys.argv[1:])
world = keras_dist.init()
calls, moved = Counter(), Counter()
plain = transport.allreduce


def counted_sum(link, tensor, *arguments, name):
    """Counts the collectives of gradients, and their bytes."""
    if "gradients" in name:
        calls[name] += 1
        moved[name] += tensor.dtype.size * int(tf.size(tensor))
    return plain(link, tensor, *arguments, name=name)


counted = {}
transport.allreduce = counted_sum
for layers in layer_counts:
    calls.clear()
    moved.clear()
    model = keras.Sequential(
        [keras.Input((16,))] + [keras.layers.Dense(16) for _ in range(layers)]
    )
    model.compile("sgd", "mse", run_eagerly=True)
    x = keras.ops.ones((8 * world.size, 16))
    keras_dist.dist_fit(model, x, x, batch_size=8, verbose=0)
    counted[layers] = calls.total(), moved.total()
transport.allreduce = plain

times = {}
for name, size in sizes.items() if world.size > 1 else ():
    tensor = tf.zeros([size // 4])
    own = []
    for _ in range(2 + repetitions):
        begin = time.perf_counter()
        comm.sum_tensors([tensor], name=name, dtype=tf.float32)
        own.append(time.perf_counter() - begin)
    times[name] = max(keras_dist.gather(statistics.median(own[2:])))
if world.rank == 0:
    line = {
        "counted": counted,
        "times": times,
        "transport": comm.transport_name(),
    }
    print("measured: " + json.dumps(line), flush=True)
keras_dist.gather("done")
os._exit(0)
