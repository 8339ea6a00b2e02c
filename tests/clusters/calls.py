"""Functions that ranks of Ray and Spark call; copied there by value."""

import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import psutil

import keras_dist

ROWS, BATCH = 96, 8


def weights_of(size, fit):
    """The weights of a small model after two epochs by `fit`, for so many ranks."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    fit(model, x, y, batch_size=BATCH * size, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([weights.ravel() for weights in model.get_weights()])


def by_keras(model, *data, **kwargs):
    """Plain Keras."""
    model.fit(*data, **kwargs)


def train():
    """Where this rank is, and the weights that it has after a training."""

    def fit(model, *data, **kwargs):
        keras_dist.dist_fit(model, *data, lr_scaling="none", **kwargs)

    world = keras_dist.init()
    return world.rank, world.size, world.local_rank, weights_of(1, fit)


def where():
    """Names and numbers of this rank, from its environment."""
    names = ("HOROVOD_HOSTNAME", "CUDA_VISIBLE_DEVICES", "TF_NUM_INTRAOP_THREADS")
    return keras_dist.rank(), *map(os.environ.get, names)


def fail(rank):
    """One rank raises, while the others compute."""
    if keras_dist.rank() == rank:
        raise KeyError("tea")
    time.sleep(300)


def fail_at_first(count):
    """Raise in the first starts."""
    start = os.environ.get("KERAS_DIST_RESTART", "0")
    if int(start) < count:
        raise KeyError("tea")
    return start


def fail_oddly():
    """An error that cannot be pickled, while the others wait in a collective."""

    class OddError(Exception):
        def __reduce__(self):
            raise TypeError("not me")

    if keras_dist.rank() == 0:
        raise OddError("a riddle")
    keras_dist.sum(1.0)


def leave(rank):
    """One rank exits."""
    if keras_dist.rank() == rank:
        raise SystemExit(3)
    time.sleep(300)


def kill(rank, generation):
    """Kill a rank (0), its agent (1), or what has started that (2)."""
    keras_dist.sum(1.0)
    if keras_dist.rank() == rank:
        process = psutil.Process()
        for _ in range(generation):
            process = process.parent()
        process.send_signal(signal.SIGKILL)
    time.sleep(300)


def idle(folder):
    """Say that this rank is there, and wait."""
    keras_dist.sum(1.0)
    (Path(folder) / str(keras_dist.rank())).touch()
    time.sleep(300)


class Steps(keras.callbacks.Callback):
    """Notes that a start has made a step, slowly, and ends the training when asked."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)
        start = os.environ.get("KERAS_DIST_RESTART", "0")
        (self.folder / f"{start}.{keras_dist.size()}").touch()
        self.model.stop_training = (self.folder / "enough").exists()


def train_on(folder):
    """Train with checkpoints until it is enough; returns size, epochs and range."""

    def fit(model, *data, **kwargs):
        kwargs |= {"epochs": 500, "resume": f"{folder}/resume", "save_steps": 3}
        fits.append(
            keras_dist.dist_fit(model, *data, callbacks=[Steps(folder)], **kwargs)
        )

    fits = []
    weights_of(1, fit)
    return keras_dist.size(), fits[0].epoch, os.environ["KERAS_DIST_NNODES"]


def remain():
    """Leave a process behind."""
    keras_dist.sum(1.0)
    os.system("setsid sleep 1234 & setsid sleep 1234 &")
