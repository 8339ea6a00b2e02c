"""The same losses on any number of ranks, beside those of two other systems.

    make curve

Trains one small network with augmentation, batch normalization and dropout, and writes
docs/curve.md, docs/curve-light.svg and docs/curve-dark.svg. What the other systems need
is installed in .bench/.
"""

import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from compare import ENVIRONMENTS, Stack, make_environments, run
from start import ROOT

sys.path.append(str(Path(__file__).parent / "stacks"))
import curve_data

PAGE = ROOT / "docs" / "curve.md"
RANKS = (2, 3, 4, 8)
SEEDS = 5
KERAS, TORCH = "curve_keras.py", "curve_torch.py"
NAMES = {
    "fashion": "Fashion-MNIST",
    "digits": "scikit-learn's digits",
    "example": "digits, by `examples/digits_keras.py`",
    "float64": "the same in float64",
}

_PAGE = """# The same curve on any number of ranks

Written by `make curve` on {date}, on {cores} cores; do not edit. Keras {keras},
TensorFlow {tensorflow}, Horovod {horovod}, PyTorch {torch}.

**On 2 to 8 ranks, no validation loss of keras_dist is further than {largest} from that
of plain Keras, and {float64} in float64. With PyTorch DDP it moves by up to {ddp}, and
the ranks of Horovod's optimizer on Keras 3 are up to {horovod_gap} apart.**

````{{container}} wide
```{{image}} curve-light.svg
:alt: Validation loss after each epoch
:class: only-light
```
```{{image}} curve-dark.svg
:alt: Validation loss after each epoch
:class: only-dark
```
````

`examples/wide_resnet.py`, with random flips and shifts, batch normalization and
dropout, trains on {rows:,} images ({data}) for {epochs} epochs, by SGD with a global
batch of {batch} on any number of processes. Each process validates its weights with the
same images. "Difference" is the largest one of a validation loss after any epoch.

| system | processes | difference | from |
|---|---|---|---|
{table}

In float32, sums in another order round differently, and training amplifies it: plain
Keras moves too, with another number of threads. DDP's processes see the same rows at
each step, but normalize by their own part of the batch, and draw noise of their own, as
its tutorials have it. Horovod's optimizer [averages nothing](how_to/migrate.md) on
Keras 3: each rank trains a model of its own.

## Accuracy

Validation accuracy in percent at the end, mean ± standard deviation of {seeds} seeds,
by plain Keras on one process and by keras_dist on four ranks. The script of the digits
stops early by its validation loss, which rounding can move to another epoch.

| data | one process | 4 ranks | largest difference of a seed |
|---|---|---|---|
{accuracy}
"""


def train(method, ranks, *options, data, seeds=1):
    """Train on so many ranks; return what each rank has reported, by seed."""
    launcher = {"ddp": "torch", "horovod": "horovodrun", "keras_dist": "keras-dist"}
    script = TORCH if method == "ddp" else KERAS
    stack = Stack(script, method, launcher.get(method, "python"), ranks=ranks)
    begin = time.perf_counter()
    wanted = ["--data", data, "--seeds", *map(str, range(seeds)), *options]
    found = run(stack, wanted)
    seconds = time.perf_counter() - begin
    print(f"{method}, {ranks} processes, {data}: {seconds:.0f} s", flush=True)
    return [found["own", str(seed)] for seed in range(seeds)]


def gap(one, other):
    """The largest difference of two lists of losses."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def at_most(*gaps):
    """The largest of some differences, rounded up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(max(gaps))) - 1)
    return f"{math.ceil(max(gaps) / unit) * unit:.2g}"


def same(ranks):
    """What all ranks have reported, which is the same to the bit."""
    if any(each != ranks[0] for each in ranks):
        raise RuntimeError(f"The ranks differ: {ranks}")
    return ranks[0]


def seeds_of(data, *options):
    """What plain Keras and keras_dist on four ranks have reported, seed by seed."""
    kinds = ((1, "alone"), (4, "keras_dist"))
    return {
        ranks: list(map(same, train(method, ranks, *options, data=data, seeds=SEEDS)))
        for ranks, method in kinds
    }


def curves(data, seeds):
    """The losses of each system, by its number of processes, and the other checks."""
    ours = {ranks: found[0]["loss"] for ranks, found in seeds.items()}
    for ranks in sorted({*RANKS} - {*ours}):
        ours[ranks] = same(train("keras_dist", ranks, data=data)[0])["loss"]
    one_thread = same(train("one_thread", 1, data=data)[0])["loss"]
    horovod = train("horovod", 8, data=data)[0]
    ddp = {ranks: train("ddp", ranks, data=data)[0][0]["loss"] for ranks in (1, *RANKS)}
    double = [
        same(train(method, ranks, "--float64", data=data)[0])["loss"]
        for method, ranks in (("alone", 1), ("keras_dist", 4))
    ]
    return {
        "ours": dict(sorted(ours.items())),
        "ddp": ddp,
        "horovod": {rank: each["loss"] for rank, each in enumerate(horovod)},
        "one thread": one_thread,
        "float64": double,
    }


def write(measured):
    """The page."""
    cores = measured["facts"]["cores"]
    ours, ddp, horovod = (measured[name] for name in ("ours", "ddp", "horovod"))
    ours_gaps = {n: gap(ours[1], each) for n, each in ours.items() if n > 1}
    ddp_gaps = {n: gap(ddp[1], each) for n, each in ddp.items() if n > 1}
    pairs = [gap(a, b) for a in horovod.values() for b in horovod.values()]
    rows = [
        *(("keras_dist", n, each, "plain Keras") for n, each in ours_gaps.items()),
        (
            "plain Keras, 1 thread",
            1,
            gap(ours[1], measured["one thread"]),
            f"{cores} threads",
        ),
        ("keras_dist in float64", 4, gap(*measured["float64"]), "plain Keras"),
        *(("PyTorch DDP", n, each, "1 process") for n, each in ddp_gaps.items()),
        ("Horovod's optimizer", 8, max(pairs), "another rank"),
    ]
    accuracy = []
    for data in filter(measured["seeds"].get, NAMES):
        found = measured["seeds"][data]
        one, four = (
            [100 * each["accuracy"][-1] for each in found[ranks]] for ranks in (1, 4)
        )
        cells = [
            f"{statistics.mean(v):.2f} ± {statistics.stdev(v):.2f}" for v in (one, four)
        ]
        cells.append(f"{max(abs(a - b) for a, b in zip(one, four, strict=True)):.2f}")
        accuracy.append(f"| {NAMES[data]} | {' | '.join(cells)} |")
    PAGE.write_text(
        _PAGE.format(
            **measured["facts"],
            largest=at_most(*ours_gaps.values()),
            float64=at_most(gap(*measured["float64"])),
            ddp=at_most(*ddp_gaps.values()),
            horovod_gap=at_most(*pairs),
            data=NAMES[measured["data"]],
            epochs=curve_data.EPOCHS,
            batch=curve_data.BATCH_SIZE,
            seeds=SEEDS,
            table="\n".join(f"| {a} | {n} | {g:.1e} | {b} |" for a, n, g, b in rows),
            accuracy="\n".join(accuracy),
        )
    )


def main():
    """Train, write and draw."""
    make_environments("torch", "plot")
    data = curve_data.best_data()
    seeds = {each: seeds_of(each) for each in ("example", data)}
    seeds["float64"] = seeds_of("example", "--float64")
    measured = {"data": data, "seeds": seeds, **curves(data, seeds[data])}
    torch = next(iter((ENVIRONMENTS / "torch").glob("torch-*.dist-info"))).name
    measured["facts"] = {
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "cores": len(os.sched_getaffinity(0)),
        "rows": len(curve_data.load(data)[0]),
        "torch": torch.removeprefix("torch-").removesuffix(".dist-info").split("+")[0],
        **{name: metadata.version(name) for name in ("keras", "tensorflow")},
        "horovod": metadata.version("horovod").split("+")[0],
    }
    path = ENVIRONMENTS / "curve.json"
    path.write_text(json.dumps(measured))
    write(measured)
    env = {**os.environ, "PYTHONPATH": str(ENVIRONMENTS / "plot")}
    plot = [sys.executable, str(Path(__file__).with_name("plot_curve.py"))]
    subprocess.run([*plot, str(path)], env=env, check=True)
    print("written: docs/curve.md, docs/curve-light.svg, docs/curve-dark.svg")


if __name__ == "__main__":
    sys.exit(main())
