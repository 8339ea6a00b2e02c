"""Seconds of an evaluation on two ranks over those on one, with one thread a rank.

    python benchmarks/evaluation.py

Two ranks evaluate the same rows with three methods, in turn:
`DistributedModel.evaluate` on both; plain Keras on the first one alone, while the other
waits; and the floor, the limit of the machine: plain Keras on both, each on half of the
rows, without communication. Plain Keras, too, reads its data without TensorFlow's
autotune thread, for which it would wait (`keras_dist.training.autotune`). Prints each
ratio and the medians. The claim is a median of at most 0.6 on two ranks, or, if the
floor itself is above 0.57, of at most 1.05 × it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np

import keras_dist
from keras_dist.training.autotune import without_autotune

CLAIM, ABOVE_FLOOR = 0.6, 1.05
BATCH_SIZE = 128


def compiled():
    """A small convolutional network."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    return model


def be_a_rank(rows: int, repetitions: int) -> None:
    """Measure; the first rank prints, and exits with 1 if the claim does not hold."""
    world = keras_dist.init()
    x = np.random.default_rng(0).random((rows, 28, 28, 1), np.float32)
    y = np.arange(rows) % 10
    half = x[world.rank :: 2].copy(), y[world.rank :: 2].copy()
    plain, many = compiled(), keras_dist.DistributedModel(compiled())
    arguments = {"batch_size": BATCH_SIZE, "verbose": 0}

    def on_first_rank():
        if world.rank == 0:
            with without_autotune(plain):
                plain.evaluate(x, y, **arguments)

    def without_communication():
        with without_autotune(plain):
            plain.evaluate(*half, **arguments)

    methods = {
        "one rank": on_first_rank,
        "two ranks": lambda: many.evaluate(x, y, **arguments),
        "floor": without_communication,
    }
    found = {name: [] for name in methods}
    for number in range(repetitions + 1):
        for name, method in methods.items():
            keras_dist.gather("ready")
            begin = time.perf_counter()
            method()
            seconds = max(keras_dist.gather(time.perf_counter() - begin))
            if number:  # the first one traces
                found[name].append(seconds)
        if number and world.rank == 0:
            one, two, floor = (seconds[-1] for seconds in found.values())
            print(
                f"1 rank {one:.2f} s, 2 ranks {two:.2f} s, ratio {two / one:.3f}; "
                f"2 separate processes {floor:.2f} s, ratio {floor / one:.3f}",
                flush=True,
            )
    ratios, floors = (
        [a / b for a, b in zip(found[name], found["one rank"], strict=True)]
        for name in ("two ranks", "floor")
    )
    median, floor = statistics.median(ratios), statistics.median(floors)
    limit = max(CLAIM, ABOVE_FLOOR * floor)
    if world.rank == 0:
        print(
            f"median ratio {median:.3f}, floor {floor:.3f}; claim: at most {limit:.3f}",
            flush=True,
        )
    keras_dist.gather("done")
    os._exit(0 if median <= limit else 1)


def main() -> int:
    """Start two ranks; the exit code is 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        be_a_rank(arguments.rows, arguments.repetitions)
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
    done = subprocess.run(
        [horovodrun, "--gloo", "-np", "2", *command],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )
    return min(done.returncode, 1)


if __name__ == "__main__":
    sys.exit(main())
