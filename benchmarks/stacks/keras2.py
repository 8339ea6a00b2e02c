"""Keras 2: Horovod's own layer beside its ceiling, or MultiWorkerMirroredStrategy.

Methods: "horovod", "multiworker". Needs TF_USE_LEGACY_KERAS=1.
"""

import contextlib
import json
import os
import sys

import common
import keras_models
import tensorflow as tf
import tf_keras as keras

sys.modules["keras"] = keras  # for the example's network
arguments = common.arguments("horovod", "multiworker")
threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)
strategy = None
if arguments.method == "multiworker":
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    rank, size = task["index"], strategy.num_replicas_in_sync
else:
    import horovod.tensorflow.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()


def barrier():
    """Wait for the other rank."""
    hvd.allreduce(tf.constant(0.0), name="barrier")


for name in arguments.models:
    x, y = common.rows_of(name, size, arguments.scale)
    own, rows_of_step = (x[rank::size], y[rank::size]), common.BATCH_SIZE * size
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras_models.make(keras, name)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        if not strategy:
            optimizer = hvd.DistributedOptimizer(optimizer)
        model.compile(**keras_models.compile_arguments(optimizer))
    clock, after = common.Clock("own", name, rows_of_step), None
    if not strategy:
        twin = keras_models.Twin(
            keras, name, rows_of_step, own, common.BATCH_SIZE, barrier
        )
        after = twin.turn
    callbacks = [keras_models.clock_callback(keras, clock, after)]
    fit = {"epochs": common.EPOCHS, "verbose": 0}
    if strategy:
        rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        # A batch of the strategy is that of all workers.
        rows = rows.batch(rows_of_step).with_options(options)
        model.fit(rows, callbacks=callbacks, **fit)
    else:
        callbacks.insert(0, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
        model.fit(*own, batch_size=common.BATCH_SIZE, callbacks=callbacks, **fit)
        twin.clock.report()
    clock.report()
sys.stdout.flush()
os._exit(0)
