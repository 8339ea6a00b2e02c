"""A small fit that says when its parts have ended, and counts its collectives.

Arguments: "plain" or a launcher; when it was started, in seconds since 1970.
"""

import json
import os
import sys
import time

import keras
import numpy as np

is_plain, begin = sys.argv[1] == "plain", float(sys.argv[2])
times, counted = {}, {"collectives": 0, "bytes": 0}


def note(part: str) -> None:
    """Keep when a part has ended first."""
    times.setdefault(part, time.time() - begin)


def count(transport) -> None:
    """Count the collectives of the transport, and their bytes."""
    run = transport.run

    def call(verb, link, tensor, *arguments, **options):
        counted["collectives"] += 1
        counted["bytes"] += tensor.dtype.size * int(np.prod(tensor.shape))
        return run(verb, link, tensor, *arguments, **options)

    transport.run = call


if not is_plain:
    import keras_dist
    from keras_dist.comm import transport

    note("import")
    keras_dist.init()
    note("connect")
    count(transport)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
x = np.ones((32, 8), "float32")
mark = {"on_train_batch_end": lambda batch, logs: note("first step")}
options = {"batch_size": 16, "verbose": 0}
options["callbacks"] = [keras.callbacks.LambdaCallback(**mark)]
if is_plain:
    model.fit(x, x[:, :1], **options)
    print("measured: " + json.dumps({"seconds": times}), flush=True)
    os._exit(0)
keras_dist.dist_fit(model, x, x[:, :1], batch="global", **options)
note("fit")
found = dict(counted)
slowest = {name: max(each[name] for each in keras_dist.gather(times)) for name in times}
if keras_dist.rank() == 0:
    print("measured: " + json.dumps({"seconds": slowest, **found}), flush=True)
keras_dist.gather("done")
os._exit(0)
