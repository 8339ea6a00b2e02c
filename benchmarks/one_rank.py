"""Seconds of a step of `dist_fit` on one rank over those of `model.fit`.

    python benchmarks/one_rank.py

Trains the same model by both, alternately, in one process, and prints the ratio of each
pair of epochs and the median. The claim is a median of at most 1.01.
"""

import statistics
import sys
import time

import keras
import numpy as np

import keras_dist

CLAIM = 1.01
PAIRS = 15


class Epochs(keras.callbacks.Callback):
    """Seconds of each epoch after the first, which traces."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            self.seconds.append(time.perf_counter() - self._begin)


def make_model():
    """A small convolutional network: a step of some milliseconds."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


def main():
    """Prints what was measured; the exit code is 1 where the claim does not hold."""
    x = np.random.default_rng(0).random((3200, 28, 28, 1), np.float32)
    y = np.arange(3200) % 10
    models = make_model(), make_model()
    ratios = []
    for pair in range(PAIRS):
        seconds = {}
        order = [(0, keras.Model.fit), (1, keras_dist.dist_fit)]
        for place, fit in order if pair % 2 else reversed(order):
            epochs = Epochs()
            fit(models[place], x, y, epochs=3, verbose=0, callbacks=[epochs])
            seconds[place] = min(epochs.seconds)
        ratios.append(seconds[1] / seconds[0])
        print(f"{ratios[-1]:.4f}", flush=True)
    median = statistics.median(ratios)
    print(f"median {median:.4f}, claim {CLAIM}; {seconds[0] / 100 * 1e3:.2f} ms a step")
    return 0 if median <= CLAIM else 1


if __name__ == "__main__":
    sys.exit(main())
