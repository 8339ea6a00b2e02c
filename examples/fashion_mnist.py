"""A wide residual network on Fashion-MNIST, on many processes.

    keras-dist run -np 2 examples/fashion_mnist.py --target-accuracy 0.85

`horovodrun -np 2 python examples/fashion_mnist.py` also starts it. To see what differs
from the script for one process, `diff` it with `fashion_mnist_single.py`.
"""

import argparse
from pathlib import Path

import keras
from data import load_fashion_mnist
from wide_resnet import wide_resnet

import keras_dist

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128, help="per process")
parser.add_argument("--val-batch-size", type=int, default=500, help="per process")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--base-lr", type=float, default=0.05, help="for one process")
parser.add_argument("--wd", type=float, default=1e-4, help="weight decay (L2)")
parser.add_argument("--width", type=int, default=1, help="use 10 on a GPU")
parser.add_argument("--log-dir", type=Path, help="for TensorBoard and epochs.csv")
parser.add_argument("--rows", type=int, help="use only this many rows of each set")
parser.add_argument("--target-accuracy", type=float, help="stop when reached")
parser.add_argument("--patience", type=int, default=1, help="epochs in a row")
arguments = parser.parse_args()


def learning_rate(epoch: int) -> float:
    """Return the base rate, divided by ten at each of the epochs 15, 25 and 35."""
    return arguments.base_lr * 0.1 ** sum(epoch >= drop for drop in (15, 25, 35))


if keras_dist.local_rank() == 0:
    load_fashion_mnist()  # one rank of each host downloads it, if necessary
keras_dist.gather("loaded")  # the others wait here
(x, y), validation_data = load_fashion_mnist(arguments.rows)

keras.utils.set_random_seed(0)
model = wide_resnet(
    mean=x.mean(), variance=x.var(), width=arguments.width, wd=arguments.wd
)
model.compile(
    optimizer=keras.optimizers.SGD(arguments.base_lr, momentum=0.9, nesterov=True),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)

callbacks = [keras.callbacks.LearningRateScheduler(learning_rate)]
if arguments.log_dir is not None:
    arguments.log_dir.mkdir(parents=True, exist_ok=True)
    callbacks += [
        keras.callbacks.TensorBoard(str(arguments.log_dir)),
        keras.callbacks.CSVLogger(str(arguments.log_dir / "epochs.csv")),
    ]
if arguments.target_accuracy is not None:
    callbacks.append(
        keras_dist.StopAtAccuracy(arguments.target_accuracy, arguments.patience)
    )

keras_dist.dist_fit(
    model,
    x,
    y,
    batch_size=arguments.batch_size,
    validation_data=validation_data,
    validation_batch_size=arguments.val_batch_size,
    epochs=arguments.epochs,
    callbacks=callbacks,
    verbose=2,
    warmup_epochs=1,
)
