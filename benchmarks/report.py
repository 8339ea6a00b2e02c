"""The document and the plot of `make bench`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
MODELS = {
    "cnn": "small CNN, 225 k parameters",
    "mlp": "MLP 784–2048–2048–10, 5.8 M",
    "wide_resnet": "wide residual network, width 1",
}

SHARED = 'keras_dist, `batch="global"`'
ONE, OURS_ON_ONE = "one process", "keras_dist on one process"
OVER_TENSORFLOW = "keras_dist over TensorFlow"
TENSORFLOW_CEILING = "ceiling over TensorFlow"

# Whose share of the ceiling is printed, and the name of the ceiling.
OURS = {"keras_dist": "ceiling", OVER_TENSORFLOW: TENSORFLOW_CEILING}

# Models of the table of layers.
LAYERS = {
    "wide_resnet": "wide residual network, statistics of the global batch",
    "dropout": "small CNN with three `Dropout`",
}

# Of the ceiling, of plain `model.fit` on one process, and of the best peer's rows per
# second.
GOALS = {"cnn": 0.97, "mlp": 0.90, "wide_resnet": 0.97}
TENSORFLOW_GOALS = {"cnn": 0.95, "mlp": 0.65}
ONE_GOAL = 1.0
PEER_GOAL = 1.15

# Of one rank beside plain `model.fit`: the share of a step.
STEP_GOAL = 0.01

# Of each of one rank and of two: seconds to the first step; MiB, of which one copy of
# the MLP's gradients has 22.3.
GRADIENTS = 22.3
FIRST_STEP_GOALS = {1: 1.0, 2: 0.4}
MEMORY_GOALS = {1: GRADIENTS, 2: GRADIENTS + 16}
PEERS = {
    "Horovod on Keras 2": "Keras 2 ceiling",
    "MultiWorkerMirrored on Keras 2": "Keras 2 ceiling",
    "PyTorch DDP": "PyTorch ceiling",
}

# Model → stack → rows per second in each round.
Rates = Mapping[str, Mapping[str, Sequence[float]]]

_HEAD = """# Performance

Written by `make bench`; do not edit. Rows per second of all ranks together, on {ranks}
ranks and {cores} cores ({machine}, no GPU); each rank has its share of the threads.
Medians of {rounds} rounds (smallest to largest). In each round all took turns,
in a different order. Random images of 28 × 28 pixels, with 128 rows per
batch and rank, and SGD with momentum. The measurement took {minutes:.0f} minutes.

Page faults and seconds in the kernel, for 1000 rows of all ranks, show whether each
step gets new memory ([why](decisions.md#speed-on-one-machine)).

The ceiling is the same processes without averaging: plain training on each rank's rows,
in turn with ours, epoch by epoch; for one process it is plain `model.fit`. Each share
is the median of all rounds' shares. The first epoch does not count, nor does the first
step of an epoch. Our ranks communicate over Gloo, or, where it says so, over
TensorFlow's own collectives.

![Rows per second beside the ceiling](performance.png)
"""


@dataclass(frozen=True)
class Spread:
    """A median, and the smallest and largest of what it is the median of."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The spread of some values."""
    return Spread(statistics.median(values), min(values), max(values))


def ratio(rates: Mapping[str, Sequence[float]], one: str, other: str) -> Spread:
    """Of two stacks, round by round."""
    return spread([a / b for a, b in zip(rates[one], rates[other], strict=True)])


def write(
    rates: Rates,
    system: Mapping[str, Mapping[str, Sequence[Any]]],
    shared: Rates,
    layers: Rates,
    costs: Mapping[str, Mapping[str, Sequence[float]]],
    facts: Mapping[str, Any],
) -> None:
    """Write docs/performance.md.

    Args:
        rates: What was measured.
        system: Page faults and seconds in the kernel in each round.
        shared: The same, of one global batch that ranks or devices share.
        layers: The same, of models with batch normalization or dropout.
        costs: MiB of memory and seconds to the first step, by stack.
        facts: How, for the head of the document.
    """
    parts = [_HEAD.format(**facts)]
    for model, found in rates.items():
        parts += [
            f"\n## {MODELS[model][0].upper()}{MODELS[model][1:]}\n",
            _table(found, system[model]),
        ]
    parts += ["\n## The same global batch\n", _SAME_BATCH, _shared(shared)]
    parts += ["\n## Batch normalization and dropout\n", _LAYERS, _layers(layers)]
    parts += ["\n## One allreduce\n", _ALLREDUCE, _allreduce(facts["allreduce"])]
    parts += ["\n## Goals\n", _goals(rates)]
    parts += ["\n## What a rank needs\n", _costs(costs, facts["one rank"])]
    (DOCS / "performance.md").write_text("\n".join(parts) + "\n")


def ceiling_of(stack: str) -> str:
    """The ceiling that belongs to a stack."""
    return (OURS | PEERS)[stack]


def _table(
    found: Mapping[str, Sequence[float]], system: Mapping[str, Sequence[Any]]
) -> str:
    lines = [
        "| stack | rows per second | ceiling | share of it | page faults | kernel |",
        "|---|---|---|---|---|---|",
    ]
    ceilings = OURS | PEERS | {OURS_ON_ONE: ONE}
    for stack, values in found.items():
        if stack in (OURS | PEERS).values():
            continue
        own, ceiling = spread(values), ceilings.get(stack)
        above = share = "–"
        if ceiling:
            of = ratio(found, stack, ceiling)
            above = f"{spread(found[ceiling]).median:,.0f}"
            share = f"{of.median:.2f} ({of.low:.2f}–{of.high:.2f})"
        faults, seconds = map(statistics.median, zip(*system[stack], strict=True))
        lines.append(
            f"| {stack} | {own.median:,.0f} ({own.low:,.0f}–{own.high:,.0f}) "
            f"| {above} | {share} | {faults:,.0f} | {seconds:.3f} s |"
        )
    return "\n".join(lines)


_SAME_BATCH = """The global batch has 256 rows; the script is for one process.
`MirroredStrategy`, and `keras.distribution` on JAX, which compiles the step, have two
devices in one process; `keras.distribution` on keras-nightly's torch backend has two
processes, each given half of the rows. Rows per second, and in brackets the ratio to
plain `model.fit` in the same round. –: the process ended.
"""


def _shared(shared: Rates) -> str:
    names = [MODELS[model].split(",")[0] for model in shared]
    lines = [f"| stack | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for stack in next(iter(shared.values())):
        cells = [stack]
        for found in shared.values():
            if not found.get(stack):
                cells.append("–")
                continue
            own, of = spread(found[stack]), ratio(found, stack, "one process")
            cells.append(f"{own.median:,.0f} ({of.median:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_LAYERS = """Batch normalization exchanges its statistics, and a rank draws its rows of
one process's random numbers. Rows per second, and in brackets the share of the ceiling,
which does neither.
"""


def _layers(layers: Rates) -> str:
    lines = [f"| model | {' | '.join(OURS)} |", "|---" * (1 + len(OURS)) + "|"]
    for model, found in layers.items():
        cells = []
        for stack, ceiling in OURS.items():
            own, of = spread(found[stack]), ratio(found, stack, ceiling)
            cells.append(f"{own.median:,.0f} ({of.median:.2f})")
        lines.append(f"| {LAYERS[model]} | {' | '.join(cells)} |")
    return "\n".join(lines)


_ALLREDUCE = """Milliseconds of a graph with one allreduce, on the slower rank. Busy: as
many other processes as there are cores compute all the time.
"""


def _allreduce(measured: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    columns = [(name, load) for load in ("idle", "beside") for name in measured]
    words = {"idle": "idle", "beside": "busy"}
    heads = [f"{name}, {words[load]}" for name, load in columns]
    lines = [f"| size | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for size in measured["horovod"]["idle"]:
        cells = [f"{measured[name][load][size]:.1f}" for name, load in columns]
        kib = int(size)
        text = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _goals(rates: Rates) -> str:
    lines = ["| goal | measured | |", "|---|---|---|"]

    def line(goal: str, measured: float, is_met: bool) -> None:
        lines.append(f"| {goal} | {measured:.2f} | {'met' if is_met else 'NOT met'} |")

    for model, found in rates.items():
        name, goal = MODELS[model].split(",")[0], GOALS[model]
        share = ratio(found, "keras_dist", "ceiling").median
        line(f"{name}: at least {goal} of the ceiling", share, share >= goal)
        if model in TENSORFLOW_GOALS:
            goal = TENSORFLOW_GOALS[model]
            share_there = ratio(found, OVER_TENSORFLOW, TENSORFLOW_CEILING).median
            words = f"{name}, over TensorFlow: at least {goal} of the ceiling"
            line(words, share_there, share_there >= goal)
        share_of_plain = ratio(found, OURS_ON_ONE, ONE).median
        words = f"{name}: one process, at least {ONE_GOAL:.2f} × plain Keras"
        line(words, share_of_plain, round(share_of_plain, 2) >= ONE_GOAL)
        peers = [peer for peer in PEERS if peer in found]
        if model == "wide_resnet":
            best = max(ratio(found, p, ceiling_of(p)).median for p in peers)
            words = f"{name}: highest share of its ceiling, best peer {best:.2f}"
            line(words, share, share >= best)
            continue
        peer = max(peers, key=lambda p: statistics.median(found[p]))
        of = ratio(found, "keras_dist", peer).median
        line(f"{name}: at least {PEER_GOAL} × {peer}", of, of >= PEER_GOAL)
    return "\n".join(lines)


def _costs(
    costs: Mapping[str, Mapping[str, Sequence[float]]], one_rank: Mapping[str, float]
) -> str:
    lines = [
        f"In separate processes, in turn. The MLP has {GRADIENTS} MiB of gradients.",
        "",
        "| for each rank | ranks | `dist_fit` | plain `model.fit` | difference |",
        "|---|---|---|---|---|",
    ]
    more = {}
    for what, unit in (
        ("memory", "peak memory, MiB"),
        ("first step", "seconds to the first step"),
    ):
        for ranks in (1, 2):
            ours, plain = (
                costs[what][f"{method}, {ranks}"] for method in ("keras_dist", "alone")
            )
            found = statistics.median(a - b for a, b in zip(ours, plain, strict=True))
            more[what, ranks] = round(found, 1) + 0.0  # never "-0.0"
            both = " | ".join(
                f"{found.median:.1f} ({found.low:.1f}–{found.high:.1f})"
                for found in map(spread, (ours, plain))
            )
            lines.append(f"| {unit} | {ranks} | {both} | {more[what, ranks]:.1f} |")
    share = one_rank["added"] / one_rank["step"]
    lines += ["", "| goal | measured | |", "|---|---|---|"]
    lines += [
        f"| {goal} | {measured} | {'met' if is_met else 'NOT met'} |"
        for goal, measured, is_met in (
            (
                f"one rank: at most {STEP_GOAL:.0%} more per step of the small CNN",
                f"{share:.2%} ({one_rank['added'] * 1e6:+.0f} µs of CPU time)",
                share <= STEP_GOAL,
            ),
            *(
                (
                    f"{_ranks(ranks)}: first step at most {goal} s later",
                    f"{more['first step', ranks]:.1f} s",
                    more["first step", ranks] <= goal,
                )
                for ranks, goal in FIRST_STEP_GOALS.items()
            ),
            *(
                (
                    f"{_ranks(ranks)}: at most {goal:g} MiB more",
                    f"{more['memory', ranks]:.1f} MiB",
                    more["memory", ranks] <= goal,
                )
                for ranks, goal in MEMORY_GOALS.items()
            ),
        )
    ]
    return "\n".join(lines)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"
