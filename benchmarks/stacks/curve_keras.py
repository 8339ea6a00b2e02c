"""Keras 3: one training on all ranks, validated by each rank after each epoch.

Methods: "alone", plain Keras on one process; "one_thread", the same with one thread;
"keras_dist", the same on all ranks; "horovod", with the optimizer of Horovod 0.28.1.
"""

import contextlib
import io
import os
import sys
from pathlib import Path

import curve_data
import keras
import tensorflow as tf

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from wide_resnet import wide_resnet

arguments = curve_data.arguments("alone", "one_thread", "keras_dist", "horovod")
if arguments.method in ("one_thread", "horovod"):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
if arguments.float64:
    keras.config.set_floatx("float64")
rank, size = 0, 1
if arguments.method == "keras_dist":
    import keras_dist

    keras_dist.distribute()
elif arguments.method == "horovod":
    import horovod.tensorflow.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()

EXAMPLE = Path(__file__).parents[2].joinpath("examples/digits_keras.py").read_text()


def run_example(seed):
    """Validation losses and accuracies of `examples/digits_keras.py` with a seed."""
    given = "set_random_seed(0)"
    assert given in EXAMPLE
    with contextlib.redirect_stdout(io.StringIO()):
        exec(EXAMPLE.replace(given, f"set_random_seed({seed})"), found := {})
    losses, best = found["history"].history["val_loss"], found["accuracy"]
    return losses, [best]


def train(seed):
    """Validation losses and accuracies of the network of the curve."""
    x, y, x_val, y_val = curve_data.load(arguments.data)
    mean, variance = float(x.mean()), float(x.var())
    if arguments.method == "horovod":  # each rank has its own rows
        x, y = x[rank::size], y[rank::size]
    keras.utils.set_random_seed(seed)
    model = wide_resnet(mean=mean, variance=variance, wd=1e-4)
    sgd = keras.optimizers.SGD(curve_data.LEARNING_RATE, momentum=0.9, nesterov=True)
    if arguments.method == "horovod":
        # Its callback that broadcasts raises; by the seed, all begin with one model.
        sgd = hvd.DistributedOptimizer(sgd)
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(sgd, loss, metrics=["accuracy", loss], jit_compile=False)
    history = model.fit(
        x,
        y,
        batch_size=curve_data.BATCH_SIZE // size,
        epochs=curve_data.EPOCHS,
        validation_data=(x_val, y_val),
        validation_batch_size=250,
        verbose=0,
    ).history
    return history["val_sparse_categorical_crossentropy"], history["val_accuracy"]


for seed in arguments.seeds:
    is_example = arguments.data == "example"
    curve_data.report(seed, *(run_example(seed) if is_example else train(seed)))
sys.stdout.flush()
os._exit(0)  # nothing is left to do, and TensorFlow takes seconds to end
