"""The time that repeated rows of an `Embedding` cost beside merged ones.

    horovodrun --gloo -np 2 python benchmarks/sparse.py [--pairs 5]

Three models train alternately, in the same processes: with the rows of all ranks as
they are (`sparse="auto"` and Adam), with each row once (`sparse="merged"`), and by
plain `model.fit` of each rank on its own part of the data, which exchanges nothing.
Each pair of epochs gives a ratio; medians are printed.
"""

import argparse
import json
import statistics
import time

import keras
import numpy as np

import keras_dist

STEPS = 30


class LastEpoch(keras.callbacks.Callback):
    """Seconds of the last epoch; the first one traces."""

    def on_epoch_begin(self, epoch, logs=None):
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self._begin


def classifier(vocabulary, length, width):
    """A text classifier: the mean of its words."""
    model = keras.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            keras.layers.Embedding(vocabulary, width),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", jit_compile=False)
    return model


def seconds_of(fit, model, x, y, **arguments):
    """Seconds of an epoch."""
    last = LastEpoch()
    fit(model, x, y, epochs=2, verbose=0, callbacks=[last], **arguments)
    return last.seconds


def main():
    """Prints a line for each model, on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    rank, size = keras_dist.init().rank, keras_dist.size()
    for batch, vocabulary, length, width in ((32, 20000, 100, 64), (256, 5000, 2, 16)):
        generator = np.random.default_rng(0)
        rows = batch * STEPS * size
        x = np.minimum(generator.zipf(1.3, (rows, length)), vocabulary - 1)
        x, y = x.astype("int32"), generator.integers(0, 2, rows)
        models = {
            name: classifier(vocabulary, length, width)
            for name in ("auto", "merged", "alone")
        }
        found = {name: [] for name in models}
        for pair in range(pairs):
            for name in sorted(models, reverse=pair % 2 == 1):
                keras_dist.gather("ready")
                if name == "alone":
                    fit, part, more = (
                        keras.Model.fit,
                        (x[rank::size], y[rank::size]),
                        {},
                    )
                else:
                    fit, part, more = keras_dist.dist_fit, (x, y), {"sparse": name}
                more["batch_size"] = batch
                found[name].append(seconds_of(fit, models[name], *part, **more))
        if rank == 0:
            report((batch, vocabulary, length, width), found)


def report(shape, found):
    """Prints medians and their spread."""
    milliseconds = {
        name: statistics.median(seconds) / STEPS * 1e3
        for name, seconds in found.items()
    }
    ratios = [a / b for a, b in zip(found["auto"], found["merged"], strict=True)]
    batch, vocabulary, length, width = shape
    print(
        f"batches of {batch} rows of {length} words, a table of {vocabulary}×{width}: "
        f"repeated / merged {statistics.median(ratios):.2f} "
        f"(from {min(ratios):.2f} to {max(ratios):.2f}); a step "
        + ", ".join(f"{name} {value:.1f} ms" for name, value in milliseconds.items())
    )
    print("measured: " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
