"""The effect of each setting on the training speed of two ranks, and a breakdown.

    make levers
    python benchmarks/levers.py --levers default MPI --models cnn --rounds 5

Those over MPI are left out if Open MPI is not installed (Debian: libopenmpi-dev).

All settings are measured in each round. The fraction is that of the ceiling, which the
same processes train in turn, under the same setting; rows per second are those of
`dist_fit`. Writes docs/levers.md and docs/timeline.png.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import compare
import report

# Variables of the environment under which keras_dist is measured. Those that begin with
# BENCH are read in stacks/.
LEVERS = {
    "default": {},
    "ranks not bound to cores": {"KERAS_DIST_BIND": "0"},
    "Horovod's threads push others off their core": {"BENCH_PUSH": "1"},
    "all gradients in one buffer": {"BENCH_PACK": "1"},
    "averaged after the backward pass, not during it": {"BENCH_LATE": "1"},
    "each gradient weighed, not the loss": {"BENCH_WEIGH": "1"},
    "Horovod's own cycle of 1 ms": {"HOROVOD_CYCLE_TIME": "1"},
    "Horovod's own cycle of 2.5 ms": {"HOROVOD_CYCLE_TIME": "2.5"},
    "Horovod's own cycle of 5 ms": {"HOROVOD_CYCLE_TIME": "5"},
    "a cycle after 5 ms without a tensor, not 10": {"KERAS_DIST_LONGEST_CYCLE_MS": "5"},
    "a cycle after 20 ms without a tensor, not 10": {
        "KERAS_DIST_LONGEST_CYCLE_MS": "20"
    },
    "Horovod's fusion on": {"HOROVOD_FUSION_THRESHOLD": str(128 * 2**20)},
    "Horovod's cache off": {"HOROVOD_CACHE_CAPACITY": "0"},
    "bf16 on the wire": {"BENCH_COMPRESSION": "bf16"},
    "through sockets, not out of the other rank's memory": {
        "KERAS_DIST_READ_MEMORY": "0"
    },
    "4 steps an execution": {"BENCH_STEPS": "4"},
}

# In an environment with both transports; flags of horovodrun.
TRANSPORTS = {"Gloo, where MPI is built too": "--gloo", "MPI": "--mpi"}
if compare.HAS_MPI:
    LEVERS |= dict.fromkeys(TRANSPORTS, {})

FRACTIONS = ("computing", "averaging", "waiting", "input")

_WORDS = """# What was tried, and where the time goes

Written by `make levers`; do not edit. Two ranks on {cores} cores, as in
[performance.md](performance.md){mpi}. Each setting beside the ceiling that the same
processes train in turn, under the same setting; medians of {rounds} round{s} (smallest
to largest), in each of which all settings are measured. One setting differs from round
to round as much as performance.md shows: smaller differences mean nothing.

{levers}

## Where the time goes

Shares of the time of both ranks, by `Throughput(breakdown=True)`: medians over the
epochs after the first.

{fractions}

## A timeline

Steps of the MLP as `dist_fit(timeline=...)` records them on the first rank, for each
collective: how long it waits for the other rank, and how long the sum takes.

![Timeline](timeline.png)
"""


def main() -> None:
    """Measure, print, and write."""
    parser = compare.parser_of(__doc__, rounds=3)
    parser.add_argument("--levers", nargs="+", default=list(LEVERS), choices=LEVERS)
    parser.add_argument(
        "--again", action="store_true", help="write what was measured the last time"
    )
    arguments = parser.parse_args()
    compare.make_environments()
    options = ["--scale", str(arguments.scale), "--models", *arguments.models]
    cache = compare.ENVIRONMENTS / "levers.json"
    if arguments.again:
        found = json.loads(cache.read_text())
    else:
        found = {"rounds": arguments.rounds, "rates": measured(arguments, options)}
        cache.write_text(json.dumps(found))
    table = table_of(found["rates"])
    print(table)
    if arguments.write:
        write(table, options, found["rounds"])


def measured(arguments: argparse.Namespace, options: list[str]) -> list:
    """(model, setting, [(rows per second, fraction)]) of all models and settings."""
    rates = defaultdict(list)
    for number in range(arguments.rounds):
        turn = number % len(arguments.levers)
        for lever in arguments.levers[turn:] + arguments.levers[:turn]:
            ranks = compare.run(stack_of(lever), options, LEVERS[lever])
            for model in arguments.models:
                ours, ceiling = (
                    compare.rate_of(ranks[part, model]) for part in ("own", "twin")
                )
                rates[model, lever].append((ours, ours / ceiling))
                print(
                    f"{lever}, {model}: {ours:,.0f}, {ours / ceiling:.3f}", flush=True
                )
    return [
        (*key, found) for key, found in sorted(rates.items(), key=lambda i: i[0][0])
    ]


def stack_of(lever: str) -> compare.Stack:
    """The stack that is started to measure a setting."""
    stack = compare.TABLE["keras_dist"]
    if lever not in TRANSPORTS:
        return stack
    return replace(stack, environment="mpi", flags=(TRANSPORTS[lever],))


def table_of(rates: list) -> str:
    """A line for each model and setting."""
    lines = [
        "| model | setting | share of the ceiling | rows per second |",
        "|---|---|---|---|",
    ]
    for model, lever, found in rates:
        ours, fractions = zip(*found, strict=True)
        fraction, name = report.spread(fractions), report.MODELS[model].split(",")[0]
        lines.append(
            f"| {name} | {lever} | {fraction.median:.2f} ({fraction.low:.2f} to "
            f"{fraction.high:.2f}) | {statistics.median(ours):,.0f} |"
        )
    return "\n".join(lines)


def write(table: str, options: list[str], rounds: int) -> None:
    """The document, with a breakdown and a timeline measured now."""
    timeline = compare.ENVIRONMENTS / "timeline.json"
    timeline.unlink(missing_ok=True)
    stack = compare.Stack("keras3.py", "keras_dist", "horovodrun")
    found = compare.run(stack, options, {"BENCH_BREAKDOWN": "1"})
    lines = [f"| model | {' | '.join(FRACTIONS)} |", "|---" * 5 + "|"]
    for (_, model), ranks in found.items():
        fractions = [f"{ranks[0]['fractions'][name]:.2f}" for name in FRACTIONS]
        name = report.MODELS[model].split(",")[0]
        lines.append(f"| {name} | {' | '.join(fractions)} |")
    variables = {"BENCH_TIMELINE": str(timeline), "HOROVOD_TIMELINE": "DYNAMIC"}
    compare.run(stack, ["--scale", "0.5", "--models", "mlp"], variables)
    env = {**os.environ, "PYTHONPATH": str(compare.ENVIRONMENTS / "plot")}
    plot = [sys.executable, str(Path(__file__).with_name("timeline_plot.py"))]
    subprocess.run([*plot, str(timeline)], env=env, check=True)
    words = _WORDS.format(
        cores=len(os.sched_getaffinity(0)),
        rounds=rounds,
        s="s" * (rounds > 1),
        mpi=_environment_of_mpi(),
        levers=table,
        fractions="\n".join(lines),
    )
    (report.DOCS / "levers.md").write_text(words)


def _environment_of_mpi() -> str:
    """The environment in which the transports are compared, in words."""
    python = compare.ENVIRONMENTS / "mpi" / "bin" / "python"
    if not python.exists():
        return ""
    code = "from importlib.metadata import version as v; print(v('tensorflow'))"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    )
    return f" (the last two with TensorFlow {done.stdout.strip()})"


if __name__ == "__main__":
    main()
