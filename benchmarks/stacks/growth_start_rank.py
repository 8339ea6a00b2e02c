"""One rank of `make growth-start`: what a small fit asks of the other ranks, and when.

Argument: when the launcher was started, in seconds since 1970.
"""

import json
import os
import sys
import time

import keras
import numpy as np

import keras_dist
from keras_dist import comm, fit
from keras_dist.comm import transport
from keras_dist.training import metrics

begin = float(sys.argv[1])
times = {"import": time.time() - begin}
world = keras_dist.init()
times["connect"] = time.time() - begin

# For each purpose: collectives, and bytes that this rank hands to them, by kind.
counted: dict[str, dict[str, list[int]]] = {}
purposes = ["other"]


def counting(kind):
    """Count the calls of a collective of the transport."""
    plain = getattr(transport, kind)

    def call(link, tensor, *arguments, **options):
        found = counted.setdefault(purposes[-1], {}).setdefault(kind, [0, 0])
        found[0] += 1
        found[1] += tensor.dtype.size * int(np.prod(tensor.shape))
        return plain(link, tensor, *arguments, **options)

    setattr(transport, kind, call)


def named(owner, name, purpose):
    """Count what a function calls under a purpose, unless it is called for another."""
    plain = getattr(owner, name)

    def call(*arguments, **options):
        purposes.append(purpose if len(purposes) == 1 else purposes[-1])
        try:
            return plain(*arguments, **options)
        finally:
            purposes.pop()

    setattr(owner, name, call)


for kind in ("allreduce", "allgather", "broadcast"):
    counting(kind)
named(fit.sources, "compare", "compare batches")
named(metrics, "global_result", "metrics")
for name in ("agree", "run_on_all", "gather_or_raise"):
    named(comm, name, "agree")
named(comm, "broadcast_variables", "broadcast")


class Marks(keras.callbacks.Callback):
    """When the first step and the first epoch have ended."""

    def on_train_batch_end(self, batch, logs=None):
        times.setdefault("first step", time.time() - begin)


model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
x = np.ones((world.size * 8, 8), "float32")
keras_dist.dist_fit(
    model, x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=[Marks()]
)
times["fit"] = time.time() - begin
slowest = {name: max(each[name] for each in keras_dist.gather(times)) for name in times}
if world.rank == 0:
    print("measured: " + json.dumps({"times": slowest, "counted": counted}), flush=True)
keras_dist.gather("done")
os._exit(0)
