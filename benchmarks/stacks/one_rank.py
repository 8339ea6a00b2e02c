"""The time that `dist_fit` adds to a step of `model.fit` on one rank.

    python benchmarks/stacks/one_rank.py

The added time does not depend on the model, so it is measured on one whose step takes
next to nothing: both train it alternately, in one process. The difference is that of
CPU seconds, which do not count other programs of a busy machine (one rank waits for no
other). The step of the small convolutional network is measured in the same way.
"""

import argparse
import json
import statistics
import time

import common
import keras
import keras_models
import numpy as np

import keras_dist

TINY = {"batch_size": 1, "steps": 1000}


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


def make_tiny():
    """A model whose step takes next to nothing."""
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(10, "softmax")])


def seconds_of_step(fit, model, shape, *, batch_size, steps):
    """Smallest of three epochs."""
    x = np.random.default_rng(0).random((batch_size * steps, *shape), np.float32)
    epochs = Epochs()
    arguments = {"batch_size": batch_size, "verbose": 0, "callbacks": [epochs]}
    fit(model, x, np.arange(len(x)) % 10, epochs=4, **arguments)
    return min(epochs.seconds) / steps


def main():
    """Prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    small, *tiny = keras_models.make(keras, "cnn"), make_tiny(), make_tiny()
    for model in (small, *tiny):
        model.compile(**keras_models.compile_arguments("sgd"))
    step = seconds_of_step(
        keras.Model.fit, small, (28, 28, 1), batch_size=128, steps=20
    )
    added = []
    for pair in range(pairs):
        seconds = [0.0, 0.0]
        order = [(0, keras.Model.fit), (1, keras_dist.dist_fit)]
        for index, fit in order if pair % 2 else reversed(order):
            seconds[index] = seconds_of_step(fit, tiny[index], (2,), **TINY)
        added.append(seconds[1] - seconds[0])
        print(f"{added[-1] * 1e6:+.0f} µs on {seconds[0] * 1e6:.0f} µs", flush=True)
    median = statistics.median(added)
    share = f"{median / step:.2%} of the {step * 1e3:.1f} ms of the small CNN"
    print(f"median {median * 1e6:+.0f} µs a step; {share}")
    print(common.MARK + json.dumps({"added": median, "step": step}))


if __name__ == "__main__":
    main()
