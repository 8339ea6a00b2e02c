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
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(600, activation="tanh"),
            keras.layers.Dense(280, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.005, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(ROWS, 16)).astype("float32")
    return model, x, x[:, :1] * x[:, 1:2]


def main(path, ranks=None):
    """Train, and write or print what came of it."""
    model, x, y = model_and_data()
    common = {"epochs": EPOCHS, "shuffle": False}
    if ranks is not None:
        model.fit(x, y, batch_size=BATCH * int(ranks), verbose=0, **common)
        np.save(path, np.concatenate([w.ravel() for w in model.get_weights()]))
        return
    world = keras_dist.init()
    is_first_start = "KERAS_DIST_RESTART" not in os.environ
    is_killed = is_first_start and os.environ.get("KILL") == str(world.rank)
    resume = os.environ.get("RESUME")
    callbacks = [Killed()] if is_killed else []
    if is_first_start and "STEPS" in os.environ:
        callbacks.append(Paced(os.environ["STEPS"], world.rank))
    keras_dist.dist_fit(
        model,
        x,
        y,
        batch_size=BATCH,
        lr_scaling="none",
        verbose=2,
        callbacks=callbacks,
        resume=resume,
        save_steps=2 if resume else None,
        **common,
    )
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    if world.is_first:
        np.save(path, weights)
    digest = hashlib.sha256(weights.tobytes()).hexdigest()
    found = [world.rank, world.local_rank, world.local_size, os.uname().nodename]
    print("found", json.dumps([*found, digest]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
