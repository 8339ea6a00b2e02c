"""Seconds of an evaluation on two ranks over those on one, with one thread a rank.

    python benchmarks/evaluation.py

Runs `DistributedModel.evaluate` on one rank and on two, alternately, and two processes
that do not talk, each with plain Keras on half of the rows: the floor, what the machine
allows. Prints each ratio and the medians. The claim is a median of at most 0.6 on two
ranks, or, where the floor itself is above 0.57, of at most 1.05 × the floor. Two cores
must be idle.
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

CLAIM, ABOVE_FLOOR = 0.6, 1.05

# With the first one keras_dist leaves the threads alone; TensorFlow reads the others.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"
)


def evaluate(rows: int, *, is_floor: bool) -> None:
    """On each rank: evaluate a small convolutional network; the first one prints."""
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
    x = np.random.default_rng(0).random((rows, 28, 28, 1), np.float32)
    y = np.arange(rows) % 10
    many = model if is_floor else keras_dist.DistributedModel(model)
    if is_floor:
        own = slice(keras_dist.rank(), None, keras_dist.size())
        x, y = x[own].copy(), y[own].copy()
    many.evaluate(x[:512], y[:512], batch_size=128, verbose=0)
    keras_dist.gather("ready")
    begin = time.perf_counter()
    many.evaluate(x, y, batch_size=128, verbose=0)
    seconds = max(keras_dist.gather(time.perf_counter() - begin))
    if keras_dist.rank() == 0:
        print(f"seconds {seconds}", flush=True)


def seconds_on(ranks: int, rows: int, *flags: str) -> float:
    """Starts an evaluation on so many ranks, and reads how long it took."""
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    command = [sys.executable, __file__, "--rows", str(rows), "--rank", *flags]
    done = subprocess.run(
        [horovodrun, "-np", str(ranks), *command],
        env={**os.environ, **ONE_THREAD, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [line for line in done.stdout.splitlines() if "seconds " in line]
    if done.returncode or not found:
        sys.exit(done.stdout + done.stderr)
    return float(found[-1].split("seconds ")[1])


def main() -> int:
    """Prints what was measured; the exit code is 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--floor", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        evaluate(arguments.rows, is_floor=arguments.floor)
        return 0
    ratios, floors = [], []
    for _ in range(arguments.repetitions):
        one, two = (seconds_on(ranks, arguments.rows) for ranks in (1, 2))
        floor = seconds_on(2, arguments.rows, "--floor")
        ratios.append(two / one)
        floors.append(floor / one)
        print(
            f"1 rank {one:.2f} s, 2 ranks {two:.2f} s, ratio {two / one:.3f}; "
            f"2 processes that do not talk {floor:.2f} s, ratio {floor / one:.3f}",
            flush=True,
        )
    median, floor = statistics.median(ratios), statistics.median(floors)
    limit = max(CLAIM, ABOVE_FLOOR * floor)
    print(f"median ratio {median:.3f}, floor {floor:.3f}; claim: at most {limit:.3f}")
    return 0 if median <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
