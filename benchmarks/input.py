"""Cost of decoding: every rank decodes all files, or each its own.

    python benchmarks/input.py

JPEG files are written to a folder of the disk. One process, two ranks and four train on
them in turn, with the same global batch. On ranks the data is sharded when its batches
are made (`late`), and before it is decoded by `keras_dist.shard` (`early`), alternately
in the same processes.
Writes docs/input.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from start import MARK, ROOT, keras_dist_run, measure

GLOBAL_BATCH = 64
SIDE = 320
WAYS = ("late", "early")
REPEATS = 2

_WORDS = """# Cost of decoding

Written by `benchmarks/input.py`; do not edit. The `map` of a data set reads and decodes
{files:,} JPEG files of {side} × {side} pixels, and resizes them to 64 × 64, with
{batch} rows in a global batch, on {cores} cores. One process and the ranks were started
in turn, for {rounds} rounds; the two ways were trained alternately in the same
processes. The table shows medians (smallest to largest). Ranks communicate over Gloo.

- late: the data is sharded after batching, so each rank decodes all images;
- early: `.apply(keras_dist.shard(batch_size))` comes before the `map`, so each image is
  decoded on one rank (`tests/ranks/test_shard.py` counts them).

Ratios are to one process of the same round. The load average of the machine, in the
minute before each round, was {load}.

## Seconds per epoch

For a model whose step takes almost no time, and for the small CNN of `make bench`.

| model | ranks | late | early | late ÷ one process | early ÷ one process |
|---|---|---|---|---|---|
{epochs}
"""


def main() -> None:
    """Measure in rounds, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=1024)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(Path(arguments.worker))
        return
    found: dict[int, list[dict[str, list[float]]]] = {1: [], 2: [], 4: []}
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), arguments.files)
        for number in range(arguments.rounds):
            loads.append(os.getloadavg()[0])
            for ranks, rounds in found.items():
                launcher = keras_dist_run(ranks) if ranks > 1 else []
                worker_command = [sys.executable, __file__, "--worker", folder]
                rounds.append(measure(*launcher, *worker_command))
                print(number + 1, ranks, rounds[-1], flush=True)
    page = _WORDS.format(
        files=arguments.files,
        side=SIDE,
        batch=GLOBAL_BATCH,
        cores=len(os.sched_getaffinity(0)),
        rounds=arguments.rounds,
        load=", ".join(f"{load:.1f}" for load in loads),
        epochs="\n".join(
            [
                *lines_of(found, "seconds of the smallest", "| smallest "),
                *lines_of(found, "seconds of the CNN", "| small CNN "),
            ]
        ),
    )
    (ROOT / "docs" / "input.md").write_text(page)


def lines_of(found, name, before=""):
    """A row of a table for each number of ranks."""
    one = [measured[f"early: {name}"] for measured in found[1]]
    for ranks, rounds in found.items():
        cells = []
        for way in ("late", "early"):
            cells.append(spread([measured[f"{way}: {name}"] for measured in rounds]))
        for way in ("late", "early"):
            own = [measured[f"{way}: {name}"] for measured in rounds]
            cells.append(spread([a / b for a, b in zip(own, one, strict=True)]))
        if ranks == 1:
            cells = [cells[1], "the same", "1", "1"]
        yield f"{before}| {ranks} | " + " | ".join(cells) + " |"


def spread(values):
    """Median, smallest and largest."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"


def write_files(folder: Path, count: int) -> None:
    """JPEG files of soft noise, as large as photographs of that size."""
    script = f"""
import numpy as np
import tensorflow as tf
random = np.random.default_rng(0)
for number in range({count}):
    soft = tf.image.resize(random.uniform(0, 255, (40, 40, 3)), ({SIDE}, {SIDE}))
    noisy = soft + random.normal(0, 12, ({SIDE}, {SIDE}, 3))
    picture = tf.cast(tf.clip_by_value(noisy, 0, 255), tf.uint8)
    tf.io.write_file(f"{folder}/{{number:05}}.jpg", tf.io.encode_jpeg(picture))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def worker(folder: Path) -> None:
    """Trains each model on each kind of data in turn; prints medians."""
    import keras  # noqa: PLC0415 - the process that starts others needs no TensorFlow
    import tensorflow as tf  # noqa: PLC0415

    import keras_dist  # noqa: PLC0415

    keras.utils.set_random_seed(1)
    size = keras_dist.size()
    batch = GLOBAL_BATCH // size
    names = sorted(str(path) for path in folder.glob("*.jpg"))
    sources = tf.data.Dataset.from_tensor_slices(
        (names, tf.range(len(names), dtype=tf.int32) % 10)
    )

    def decode(name, label):
        picture = tf.io.decode_jpeg(tf.io.read_file(name), channels=3)
        return tf.image.resize(picture, (64, 64)) / 255.0, label

    pictures = sources.map(decode, tf.data.AUTOTUNE)
    data = {
        "late": pictures.batch(batch),
        "early": sources.apply(keras_dist.shard(batch))
        .map(decode, tf.data.AUTOTUNE)
        .batch(batch),
    }
    layers = keras.layers
    models = {
        "the smallest": [layers.AveragePooling2D(64), layers.Flatten()],
        "the CNN": [
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
        ],
    }

    class Epoch(keras.callbacks.Callback):
        """Seconds of the last epoch; the first one traces."""

        def on_epoch_begin(self, epoch, logs=None):
            keras_dist.gather("all begin")
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds = time.perf_counter() - self.begin

    measured: dict[str, list[float]] = {}
    for name, body in models.items():
        model = keras.Sequential(
            [keras.Input((64, 64, 3)), *body, layers.Dense(10, activation="softmax")]
        )
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
        seconds = {way: [] for way in WAYS}
        for _ in range(REPEATS):
            for way in WAYS:
                epoch = Epoch()
                keras_dist.dist_fit(
                    model, data[way].prefetch(2), epochs=2, verbose=0, callbacks=[epoch]
                )
                seconds[way].append(max(keras_dist.gather(epoch.seconds)))
        for way in WAYS:
            measured[f"{way}: seconds of {name}"] = statistics.median(seconds[way])
    if keras_dist.rank() == 0:
        print(MARK + json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
