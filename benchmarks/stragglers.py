"""What shares by speed give where one rank is slow, and cost where none is.

    make stragglers

Two ranks, each on a core of its own, train with `batch="global"`; a control group holds
the second one to half of its core (root). `shares="equal"` and `"measured"` are trained
alternately in the same processes, and the same without the brake; and once it comes and
goes during a training. Writes docs/stragglers.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "measured: "
SHARES = ("equal", "measured")
MODELS = {"small CNN": 256, "MLP": 512}  # rows of a global batch
STEPS = 40
EPOCHS = 5
PERIOD = 4_000  # microseconds, of which the brake leaves half
PHASES = 4  # epochs of each phase of the training during which a rank becomes slow

_WORDS = """# A slow rank

Written by `make stragglers`; do not edit. Two ranks on {cores} cores train with
`batch="global"`, over Gloo. {rounds} rounds, `shares="equal"` and `shares="measured"`
alternately in the same processes: medians (smallest to largest) of the rows per second
of all ranks, after the first epoch. In the upper part a control group holds the second
rank to half of its core: the ranks together have 1.5 cores, and equal shares use 1.0.
In the lower part both ranks are equally fast.

| model | rows of a batch | slow rank | equal | measured | measured ÷ equal |
|---|---|---|---|---|---|
{rows}

The weights at the end differ from those of `model.fit` on one process, in float32, by
{difference} of the largest weight at most, in all {fits} trainings; with equal shares,
by {difference_of_equal}.

## A rank that becomes slow, and recovers

One training of the MLP, held to half a core during its epochs {slow}. Rows of a
batch that the second rank computes at the end of an epoch, of {batch}, and rows per
second of all ranks:

| epoch | rows of the second rank | rows per second |
|---|---|---|
{phases}
"""


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.rounds)
        return
    found = {name: measure(name, arguments.rounds) for name in MODELS}
    rows = [
        row_of(name, is_slow, measured)
        for is_slow in (True, False)
        for name, measured in found.items()
    ]
    differences = {
        shares: max(max(each["differences"][shares]) for each in found.values())
        for shares in SHARES
    }
    page = _WORDS.format(
        cores=len(os.sched_getaffinity(0)),
        rounds=arguments.rounds,
        rows="\n".join(rows),
        difference=f"{differences['measured']:.1g}",
        difference_of_equal=f"{differences['equal']:.1g}",
        fits=2 * len(MODELS) * arguments.rounds,
        slow=f"{PHASES + 1} to {2 * PHASES}",
        batch=MODELS["MLP"],
        phases="\n".join(
            f"| {number} | {own:,} | {speed:,.0f} |"
            for number, (own, speed) in enumerate(found["MLP"]["phases"], 1)
        ),
    )
    (ROOT / "docs" / "stragglers.md").write_text(page)


def row_of(name, is_slow, measured):
    """A row of the table."""
    speeds = measured["slow" if is_slow else "even"]
    pairs = zip(speeds["measured"], speeds["equal"], strict=True)
    cells = [
        name,
        f"{MODELS[name]}",
        "yes" if is_slow else "no",
        *(spread(speeds[shares], ",.0f") for shares in SHARES),
        spread([own / equal for own, equal in pairs], ".2f"),
    ]
    return "| " + " | ".join(cells) + " |"


def spread(values, form):
    """Median, smallest and largest."""
    shown = [statistics.median(values), min(values), max(values)]
    median, low, high = (format(value, form) for value in shown)
    return f"{median} ({low} to {high})"


def measure(name, rounds):
    """One launch; what its first rank has measured."""
    start = [sys.executable, "-m", "keras_dist", "run", "-np", "2"]
    start += ["--transport", "gloo"]  # ranks of MPI spin while they wait for others
    own = [sys.executable, __file__, "--worker", name, "--rounds", str(rounds)]
    done = subprocess.run(
        [*start, *own],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    for line in done.stdout.splitlines():
        if MARK in line:
            found = json.loads(line.split(MARK, 1)[1])
            print(name, json.dumps(found), flush=True)
            return found
    raise RuntimeError(done.stdout + done.stderr)


class Brake:
    """Holds the second rank to half a core while it is on, by a control group."""

    def __init__(self, rank):
        self.rank, self.folder = rank, None
        if rank != 1:
            return
        first = Path("/sys/fs/cgroup/cpu")  # of version 1
        root = first if first.is_dir() else Path("/sys/fs/cgroup")
        self.is_first, self.folder = root == first, root / f"slow-{os.getpid()}"
        self.root = root
        self.folder.mkdir()
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def turn(self, is_on):
        """Put it on or take it off; every rank calls this."""
        if self.folder is None:
            return
        if self.is_first:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD))
            quota = PERIOD // 2 if is_on else -1
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            quota = str(PERIOD // 2) if is_on else "max"
            (self.folder / "cpu.max").write_text(f"{quota} {PERIOD}")

    def remove(self):
        """Leave the group, and remove it."""
        if self.folder is not None:
            (self.root / "cgroup.procs").write_text(str(os.getpid()))
            self.folder.rmdir()


def worker(name, rounds):
    """Train `name` with both kinds of shares in turn; the first rank prints."""
    cores = sorted(os.sched_getaffinity(0))
    local_rank = int(os.environ["HOROVOD_LOCAL_RANK"])
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
    import keras  # noqa: PLC0415 - TensorFlow counts the cores when it is imported
    import numpy as np  # noqa: PLC0415

    import keras_dist  # noqa: PLC0415

    rank, batch = keras_dist.rank(), MODELS[name]
    brake = Brake(rank)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(STEPS * batch, 28, 28, 1)).astype("float32")
    y = generator.integers(0, 10, len(x))
    layers = keras.layers
    bodies = {
        "small CNN": [
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ],
        "MLP": [
            layers.Flatten(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(1024, activation="relu"),
        ],
    }
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            *bodies[name],
            layers.Dense(10, activation="softmax"),
        ]
    )
    begin = model.get_weights()
    given = {"batch_size": batch, "verbose": 0, "shuffle": False}

    def fresh():
        model.set_weights(begin)
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)

    def fit(shares, epochs, callbacks=()):
        fresh()
        history = keras_dist.dist_fit(
            model,
            x,
            y,
            epochs=epochs,
            batch="global",
            shares=shares,
            callbacks=list(callbacks),
            **given,
        )
        return history.history["rows_per_second"]

    expected = None
    if rank == 0:
        fresh()
        model.fit(x, y, epochs=EPOCHS, **given)
        expected = model.get_weights()
    keras_dist.gather("the other rank has waited")

    def difference():
        if expected is None:
            return 0.0
        pairs = zip(model.get_weights(), expected, strict=True)
        gap = max(float(np.abs(own - other).max()) for own, other in pairs)
        return gap / max(float(np.abs(other).max()) for other in expected)

    found = {
        "slow": {shares: [] for shares in SHARES},
        "even": {shares: [] for shares in SHARES},
        "differences": {shares: [] for shares in SHARES},
    }
    try:
        for number in range(rounds):
            for kind in ("slow", "even"):
                brake.turn(kind == "slow")
                for shares in SHARES[:: 1 if number % 2 else -1]:
                    speeds = fit(shares, EPOCHS)
                    found[kind][shares].append(statistics.mean(speeds[1:]))
                    found["differences"][shares].append(difference())
        brake.turn(False)
        if name == "MLP":
            found["phases"] = phases(fit, brake, keras, keras_dist)
    finally:
        brake.remove()
    if rank == 0:
        print(MARK + json.dumps(found), flush=True)


def phases(fit, brake, keras, keras_dist):
    """A training during which the second rank becomes slow, and recovers."""
    from keras_dist.training.session import session_of  # noqa: PLC0415

    class Watch(keras.callbacks.Callback):
        """Puts the brake on and takes it off; notes the rows of the last step."""

        own, rows = [], 0

        def on_epoch_begin(self, epoch, logs=None):
            brake.turn(PHASES <= epoch < 2 * PHASES)

        def on_train_batch_end(self, batch, logs=None):
            if batch >= STEPS - 2:
                rows = session_of(self.model).rows_trained.total()
                self.last, self.rows = rows - self.rows, rows

        def on_epoch_end(self, epoch, logs=None):
            self.own.append(keras_dist.gather(self.last)[1])

    watch = Watch()
    speeds = fit("measured", 3 * PHASES, [watch])
    return list(zip(watch.own, speeds, strict=True))


if __name__ == "__main__":
    main()
