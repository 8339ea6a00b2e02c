"""A small convolutional network for `chaos.py`: on ranks, or alone by plain Keras.

    cnn.py FILE EPOCHS LOG PACE RESUME   on ranks; the first one writes the weights to
                                         FILE, and each step to LOG
    cnn.py FILE EPOCHS                   the same script with plain `model.fit`

LOG gets a line `START STEP RANKS` for each step; PACE is a file with the seconds that
a step takes.
"""

import sys
import time
from pathlib import Path

import keras
import numpy as np
from chaos_steps import BATCH, ROWS, SAVE_STEPS, TEST_ROWS

import keras_dist


class Paced(keras.callbacks.Callback):
    """Writes each step, and takes its time."""

    def __init__(self, log, pace, world):
        super().__init__()
        self.log, self.pace, self.world = Path(log), Path(pace), world
        self.begin = time.time_ns()

    def on_train_batch_end(self, batch, logs=None):
        """A line for this step."""
        time.sleep(float(self.pace.read_text() or 0))
        if self.world.is_first:
            step = int(self.model.optimizer.iterations)
            with self.log.open("a") as file:
                file.write(f"{self.begin} {step} {self.world.size}\n")


def model_and_data():
    """Images of four textures with much noise: to train with, and to test."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=["accuracy"])
    random = np.random.default_rng(0)
    textures = random.normal(size=(4, 8, 8, 1))
    y = random.integers(0, 4, size=ROWS + TEST_ROWS)
    x = textures[y] + 1.5 * random.normal(size=(len(y), 8, 8, 1))
    return model, x.astype("float32"), y


def main(path, epochs, log=None, pace=None, resume=None):
    """Train, and write the weights; the last line is the accuracy."""
    model, x, y = model_and_data()
    given = {"batch_size": BATCH, "epochs": int(epochs), "shuffle": False, "verbose": 0}
    is_first = True
    if pace is None:
        model.fit(x[:ROWS], y[:ROWS], **given)
    else:
        world = keras_dist.init()
        is_first = world.is_first
        keras_dist.dist_fit(
            model,
            x[:ROWS],
            y[:ROWS],
            **given,
            batch="global",
            callbacks=[Paced(log, pace, world)],
            resume=resume,
            save_steps=SAVE_STEPS,
        )
    if is_first:
        np.save(path, np.concatenate([w.ravel() for w in model.get_weights()]))
        found = model.evaluate(x[ROWS:], y[ROWS:], verbose=0, return_dict=True)
        print("accuracy", found["accuracy"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
