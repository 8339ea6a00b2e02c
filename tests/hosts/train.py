"""A small training: on ranks by `dist_fit`, or alone by plain Keras.

    train.py FILE            on ranks; the first one writes the weights to FILE
    train.py FILE RANKS      plain Keras on one process, the batch of so many ranks

`KILL=RANK` kills that rank in the middle of the second epoch of the first start;
`RESUME=FOLDER` resumes from there. `STEPS=FOLDER` gets a file for each rank and step
of the first start, with `PAUSE` seconds in each step.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import keras_dist

BATCH, ROWS, EPOCHS = 8, 192, 3


class Killed(keras.callbacks.Callback):
    """Ends this rank without a word in the second epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        """Before the third batch."""
        if self.epoch == 1 and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        """Remember the epoch."""
        self.epoch = epoch


class Paced(keras.callbacks.Callback):
    """Shows where this rank is, and takes its time."""

    def __init__(self, folder, rank):
        super().__init__()
        self.folder, self.rank = Path(folder), rank
        self.pause = float(os.environ.get("PAUSE", "0"))
        self.folder.mkdir(exist_ok=True)

    def on_train_batch_end(self, batch, logs=None):
        """A file for this step."""
        time.sleep(self.pause)
        (self.folder / f"{self.rank}.{int(self.model.optimizer.iterations)}").touch()


def model_and_data():
    """A perceptron of 180,000 weights and rows for it, the same on all ranks."""
    keras.utils.set_random_seed(7)
    hidden = (keras.layers.Dense(units, activation="tanh") for units in (600, 280))
    model = keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.005, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(ROWS, 16)).astype("float32")
    return model, x, x[:, :1] * x[:, 1:2]


def flat_weights(model):
    """All weights of a model, one after the other."""
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def main(path, ranks=None):
    """Train, and write or print what came of it."""
    model, x, y = model_and_data()
    common = {"epochs": EPOCHS, "shuffle": False, "verbose": 2}
    if ranks is not None:
        model.fit(x, y, batch_size=BATCH * int(ranks), **common)
        np.save(path, flat_weights(model))
        return
    world = keras_dist.init()
    is_first_start = "KERAS_DIST_RESTART" not in os.environ
    common |= {"batch_size": BATCH, "lr_scaling": "none", "callbacks": []}
    if is_first_start and os.environ.get("KILL") == str(world.rank):
        common["callbacks"].append(Killed())
    if is_first_start and "STEPS" in os.environ:
        common["callbacks"].append(Paced(os.environ["STEPS"], world.rank))
    if "RESUME" in os.environ:
        common |= {"resume": os.environ["RESUME"], "save_steps": 2}
    keras_dist.dist_fit(model, x, y, **common)
    weights = flat_weights(model)
    if world.is_first:
        np.save(path, weights)
    digest = hashlib.sha256(weights.tobytes()).hexdigest()
    secret = hashlib.sha256(os.environ.get("KERAS_DIST_SECRET", "").encode())
    found = [world.rank, world.local_rank, world.local_size, os.uname().nodename]
    found += [digest, sorted(os.sched_getaffinity(0)), secret.hexdigest()]
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
