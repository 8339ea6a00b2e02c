"""Training speed of keras_dist on two ranks, beside its ceiling and its peers.

    make bench

Runs every stack for all models, one after the other, for some rounds, and writes
docs/performance.md and docs/performance.png: medians, spreads, and ratios within each
round. The cores must be idle. What the peers need is installed in .bench/.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import report
from start import ROOT, keras_dist_run, measure, read_measured

STACKS = Path(__file__).parent / "stacks"
ENVIRONMENTS = ROOT / ".bench"
RANKS = 2
TIMEOUT = 600  # seconds of one stack in one round


@dataclass(frozen=True)
class Stack:
    """A stack to compare: a script in stacks/, its method to average, and its launcher.

    `twin` is the name of the model that the same processes train in turn with it;
    `options` are more words for the script, of which later ones win.
    """

    script: str
    method: str
    launcher: str
    ranks: int = RANKS
    twin: str = ""
    transport: str = "horovod"
    options: tuple[str, ...] = ()


OURS = Stack("keras3.py", "both", "keras-dist", twin="ceiling")
OVER_TENSORFLOW = replace(OURS, twin=report.TENSORFLOW_CEILING, transport="tensorflow")
TABLE = {
    "keras_dist": OURS,
    report.OVER_TENSORFLOW: OVER_TENSORFLOW,
    # Each in a process of its own: what one of them does to a process, the other sees.
    report.ONE: Stack("keras3.py", "alone", "python", ranks=1),
    report.OURS_ON_ONE: Stack("keras3.py", "keras_dist", "python", ranks=1),
    "Horovod on Keras 2": Stack(
        "keras2.py", "horovod", "horovodrun", twin="Keras 2 ceiling"
    ),
    "MultiWorkerMirrored on Keras 2": Stack("keras2.py", "multiworker", "TF_CONFIG"),
    "PyTorch DDP": Stack("torch_ddp.py", "ddp", "torch", twin="PyTorch ceiling"),
}
# One global batch, shared by two ranks or by two devices of one process.
SAME_BATCH = {
    report.SHARED: Stack("same_batch.py", "keras_dist", "keras-dist"),
    report.ONE: Stack("same_batch.py", "one", "python", ranks=1),
    "MirroredStrategy": Stack("same_batch.py", "mirrored", "python", ranks=1),
    "keras.distribution on JAX": Stack("same_batch.py", "jax", "python", ranks=1),
    "keras.distribution on PyTorch": Stack("same_batch.py", "torch", "torch"),
}

# Layers that cost exchanges, or random numbers of the rows of other ranks.
_LAYERS = "--models", "wide_resnet", "dropout", "--batch-norm", "global"
LAYERS = {
    "keras_dist": replace(OURS, options=_LAYERS),
    report.OVER_TENSORFLOW: replace(OVER_TENSORFLOW, options=_LAYERS),
}

# Memory of a rank, and seconds until its first step: each in processes of its own.
COSTS = {
    f"{method}, {ranks}": Stack("keras3.py", method, launcher, ranks=ranks)
    for ranks, launcher in ((1, "python"), (2, "keras-dist"))
    for method in ("keras_dist", "alone")
}
COSTS_OPTIONS = ["--scale", "0.2", "--models", "mlp"]


def make_environments(*names: str) -> None:
    """Install what the peers need and keras_dist does not, if it is missing.

    Args:
        *names: Folders of .bench/; all of them by default.
    """
    version = ".".join(metadata.version("tensorflow").split(".")[:2])
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    for folder, packages in {
        "keras2": ["--no-deps", f"tf-keras=={version}.*"],
        "plot": ["matplotlib"],
        "jax": ["jax==0.10.2"],
        "torch": ["torch==2.13.0", "numpy", "keras-nightly==3.16.0.dev2026102704"],
    }.items():
        target = ENVIRONMENTS / folder
        if not target.is_dir() and folder in (names or [folder]):
            print(f"installing {' '.join(packages)} in {target}", flush=True)
            subprocess.run([*pip, "--target", str(target), *packages], check=True)


def run(stack: Stack, options: list[str]) -> dict[tuple[str, str], list[dict]]:
    """Train all models once.

    Args:
        stack: What is started.
        options: Of the script.

    Returns:
        What each rank has measured, by ("own" or "twin", name of the model).
    """
    script = [str(STACKS / stack.script), stack.method, *options, *stack.options]
    ranks, env = stack.ranks, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    env["KERAS_DIST_TRANSPORT"] = stack.transport
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    # Ours chooses for itself.
    if ranks > 1 and (stack.launcher == "torch" or stack.script == "keras2.py"):
        env["OMP_NUM_THREADS"] = threads
    paths = {"horovod": "keras2", "multiworker": "keras2", "ddp": "torch"}
    folder = {"jax": "jax", "torch": "torch", **paths}.get(stack.method)
    path = [str(ENVIRONMENTS / folder)] if folder else []
    if stack.script == "keras2.py":
        env["TF_USE_LEGACY_KERAS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([*path, str(ROOT)])
    command = [sys.executable, *script]
    if stack.launcher == "horovodrun":
        horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "--gloo"]
        commands = [([*horovodrun, "-np", str(ranks), *command], env)]
    elif stack.launcher == "keras-dist":
        commands = [([*keras_dist_run(ranks), *command], env)]
    else:
        own = _variables_of_ranks(stack, ranks)
        commands = [(command, {**env, **variables}) for variables in own]
    processes = [
        subprocess.Popen(
            line, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for line, own in commands
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = defaultdict(list)
    for out, _ in outputs:
        for rank_line in read_measured(out):
            found[rank_line["part"], rank_line["model"]].append(rank_line)
    if not found or any(len(lines) != ranks for lines in found.values()):
        raise RuntimeError(f"{stack} failed.\n" + "\n".join(map("\n".join, outputs)))
    return found


def _variables_of_ranks(stack: Stack, ranks: int) -> list[dict[str, str]]:
    """Variables with rank and size of each process, for stacks without a launcher."""
    ports = [_free_port() for _ in range(ranks)]
    workers = [f"127.0.0.1:{port}" for port in ports]
    return {
        "python": [{}],
        "TF_CONFIG": [
            {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": workers},
                        "task": {"type": "worker", "index": rank},
                    }
                )
            }
            for rank in range(ranks)
        ],
        "torch": [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports[0]),
            }
            for rank in range(ranks)
        ],
    }[stack.launcher]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def rate_of(ranks: list[dict]) -> float:
    """Rows per second of all ranks, by the clock of the slowest one."""
    return ranks[0]["rows"] / max(own["seconds"] for own in ranks)


def main() -> int:
    """Measure, write, and print the files that were written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(report.MODELS))
    parser.add_argument("--scale", type=float, default=1, help="of the steps")
    parser.add_argument("--write", action="store_true", help="the document and plot")
    parser.add_argument("--stacks", nargs="+", default=list(TABLE), choices=TABLE)
    arguments = parser.parse_args()
    make_environments()
    measured = ENVIRONMENTS / "measured.json"
    begin = time.perf_counter()
    rates, system = speeds(arguments, {name: TABLE[name] for name in arguments.stacks})
    if arguments.write:
        shared, layers = (speeds(arguments, each)[0] for each in (SAME_BATCH, LAYERS))
        facts = {
            "ranks": RANKS,
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "rounds": arguments.rounds,
        }
        costs = measured_costs(arguments.rounds)
        one_rank = [sys.executable, str(STACKS / "one_rank.py"), "--pairs", "5"]
        allreduce = [sys.executable, str(STACKS / "allreduce.py")]
        facts["one rank"] = measure(*one_rank)
        facts["allreduce"] = {
            name: measure(*keras_dist_run(RANKS), *allreduce, KERAS_DIST_TRANSPORT=name)
            for name in ("horovod", "tensorflow")
        }
        facts["minutes"] = (time.perf_counter() - begin) / 60
        measured.write_text(
            json.dumps(
                {
                    "rates": rates,
                    "system": system,
                    "shared": shared,
                    "layers": layers,
                    "facts": facts,
                    "costs": costs,
                }
            )
        )
        report.write(rates, system, shared, layers, costs, facts)
        env = {**os.environ, "PYTHONPATH": str(ENVIRONMENTS / "plot")}
        plot = [sys.executable, str(Path(__file__).with_name("plot.py"))]
        subprocess.run([*plot, str(measured)], env=env, check=True)
        print("written: docs/performance.md, docs/performance.png")
    return 0


def speeds(
    arguments: argparse.Namespace, table: dict[str, Stack]
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, list[Any]]]]:
    """Measure each round, by model and stack of a table.

    Returns:
        Rows per second; and page faults and seconds in the kernel, for 1000 rows.
    """
    options = ["--scale", str(arguments.scale), "--models", *arguments.models]
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    system: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for number in range(arguments.rounds):
        # Another order each round: no stack always follows the same one.
        names = list(table)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for (part, model), ranks in run(table[name], options).items():
                stack = name if part == "own" else table[name].twin
                rates[model][stack].append(rate_of(ranks))
                thousands = ranks[0]["rows"] / 1000
                costs = ("page_faults", "system_seconds")
                sums = [sum(own.get(cost, 0) for own in ranks) for cost in costs]
                system[model][stack].append([each / thousands for each in sums])
                print(number + 1, stack, model, rates[model][stack][-1], flush=True)
    return rates, system


def measured_costs(rounds: int) -> dict[str, dict[str, list[float]]]:
    """MiB of memory and seconds to the first step in each round, by `COSTS`."""
    costs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for name, stack in COSTS.items():
            ranks = run(stack, COSTS_OPTIONS)["own", "mlp"]
            costs["memory"][name].append(max(own["memory"] for own in ranks) / 2**20)
            costs["first step"][name].append(max(own["first_step"] for own in ranks))
    return costs


if __name__ == "__main__":
    sys.exit(main())
