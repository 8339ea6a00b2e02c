"""The time that `dist_fit` adds to a step of `model.fit` on one rank.

    python benchmarks/one_rank.py

The added time does not depend on the model, so it is measured on one whose step takes
next to nothing: both train it alternately, in one process. The difference is that of
CPU seconds, which do not count other programs of a busy machine (one rank waits for no
other). The claim is a median of at most 1 % of the step of a small convolutional
network, measured in the same way.
"""

import argparse
import json
import statistics
import sys
import time

import keras
import numpy as np

import keras_dist

CLAIM = 0.01
STEPS = 1000


class Epochs(keras.callbacks.Callback):
    """Processor seconds of each epoch after the first one, which traces."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._begin = time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            self.seconds.append(time.process_time() - self._begin)


def compiled(*layers):
    """A model that ends in ten numbers."""
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False)
    return model


def small_cnn():
    """The small convolutional network of the benchmarks."""
    return compiled(
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
    )


def seconds_of_step(fit, model, shape, *, batch_size, steps):
    """Smallest of three epochs."""
    x = np.random.default_rng(0).random((batch_size * steps, *shape), np.float32)
    epochs = Epochs()
    arguments = {"batch_size": batch_size, "verbose": 0, "callbacks": [epochs]}
    fit(model, x, np.arange(len(x)) % 10, epochs=4, **arguments)
    return min(epochs.seconds) / steps


def main():
    """Prints the measurements; the exit code is 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    small = small_cnn()
    step = seconds_of_step(
        keras.Model.fit, small, (28, 28, 1), batch_size=128, steps=20
    )
    tiny = {"batch_size": 1, "steps": STEPS}
    models = compiled(keras.Input((2,))), compiled(keras.Input((2,)))
    added = []
    for pair in range(pairs):
        seconds = [0.0, 0.0]
        order = [(0, keras.Model.fit), (1, keras_dist.dist_fit)]
        for index, fit in order if pair % 2 else reversed(order):
            seconds[index] = seconds_of_step(fit, models[index], (2,), **tiny)
        added.append(seconds[1] - seconds[0])
        print(f"{added[-1] * 1e6:+.0f} µs on {seconds[0] * 1e6:.0f} µs", flush=True)
    median = statistics.median(added)
    print(
        f"median {median * 1e6:+.0f} µs a step; {median / step:.4f} of the "
        f"{step * 1e3:.1f} ms of a small CNN, claim at most {CLAIM}"
    )
    print("measured: " + json.dumps({"added": median, "step": step}))
    return 0 if median <= CLAIM * step else 1


if __name__ == "__main__":
    sys.exit(main())
