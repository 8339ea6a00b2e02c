"""Keras 3: `dist_fit`, or plain `model.fit` on each process without averaging.

Methods: "both", `dist_fit` and beside it its ceiling, plain `model.fit` on this rank's
part of the rows, epoch by epoch in turn; "keras_dist" or "alone", one of them.
"""

import os
import statistics
import sys

import common
import keras
import keras_models
import levers
import tensorflow as tf

import keras_dist
from keras_dist.comm import collectives
from keras_dist.optimizer import attach

arguments = common.arguments("both", "keras_dist", "alone")
world = keras_dist.init()
# Take back what keras_dist does by default.
if os.environ.get("BENCH_PACK"):
    collectives._LARGE = float("inf")
if os.environ.get("BENCH_PUSH"):
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
if os.environ.get("BENCH_LATE"):
    at_once = keras_dist.comm.sum_tensors

    def late(values, **options):
        """Sums of tensors, none of which is sent before all of them are computed."""
        with tf.control_dependencies(values):
            return at_once([tf.identity(value) for value in values], **options)

    keras_dist.comm.sum_tensors = late
if os.environ.get("BENCH_WEIGH"):
    attach.weight_loss = lambda optimizer, loss: loss
for name in arguments.models:
    x, y = common.rows_of(name, world.size, arguments.scale)
    own = x[world.rank :: world.size], y[world.rank :: world.size]
    rows = common.BATCH_SIZE * world.size
    rows *= levers.compiled().get("steps_per_execution", 1)
    keras.utils.set_random_seed(0)
    model = keras_models.make(keras, name)
    optimizer = keras_models.optimizer(keras, arguments.optimizer)
    model.compile(**keras_models.compile_arguments(optimizer))
    twin = None
    if arguments.method == "both":
        twin = keras_models.Twin(
            keras, name, rows, own, common.BATCH_SIZE, lambda: keras_dist.gather("")
        )
    keras_dist.gather("ready")
    fractions = {}
    clock = common.Clock("own", name, rows)
    after = twin.turn if twin else None
    fit = {
        "batch_size": common.BATCH_SIZE,
        "epochs": common.EPOCHS,
        "callbacks": [keras_models.clock_callback(keras, clock, after)],
        "verbose": 0,
    }
    if arguments.method == "alone":
        model.fit(*own, **fit)
    else:
        if os.environ.get("BENCH_BREAKDOWN"):
            fit["callbacks"].append(keras_dist.Throughput(breakdown=True))
        logs = keras_dist.dist_fit(model, x, y, **fit, **levers.fitted()).history
        fractions = {
            part: statistics.median(logs[part][1:])
            for part in ("computing", "averaging", "waiting", "input")
            if part in logs
        }
    clock.report(fractions=fractions)
    if twin:
        twin.clock.report()
    keras_dist.gather("done")
sys.stdout.flush()
os._exit(0)  # nothing is left to do, and TensorFlow takes seconds to end
