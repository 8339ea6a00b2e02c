"""Training speed of keras_dist on two ranks, beside its ceiling and its peers.

    make bench

Runs every stack for all models, one after the other, for some rounds, and writes
docs/performance.md and docs/performance.png: medians, spreads, and ratios within each
round. The cores must be idle. Environments of the peers are created in .bench/; if Open
MPI is installed (Debian: libopenmpi-dev), also one of keras_dist over MPI.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import report

ROOT = Path(__file__).parents[1]
STACKS = Path(__file__).parent / "stacks"
ENVIRONMENTS = ROOT / ".bench"
MARK = "measured: "
RANKS = 2
TIMEOUT = 600  # seconds of one stack in one round


@dataclass(frozen=True)
class Stack:
    """A stack to compare: a script in stacks/, its method to average, and its launcher.

    `twin` is the name of the model that the same processes train in turn with it,
    `environment` one in .bench/ instead of our own, and `flags` are the launcher's.
    """

    script: str
    method: str
    launcher: str
    ranks: int = RANKS
    twin: str = ""
    environment: str = ""
    flags: tuple[str, ...] = ("--gloo",)


TABLE = {
    "keras_dist": Stack("keras3.py", "both", "horovodrun", twin="ceiling"),
    "one process": Stack("keras3.py", "alone", "python", ranks=1),
    "Horovod on Keras 2": Stack(
        "keras2.py", "horovod", "horovodrun", twin="Keras 2 ceiling"
    ),
    "MultiWorkerMirrored on Keras 2": Stack("keras2.py", "multiworker", "TF_CONFIG"),
    "PyTorch DDP": Stack("torch_ddp.py", "ddp", "torch", twin="PyTorch ceiling"),
}
HAS_MPI = shutil.which("mpicxx") is not None
if HAS_MPI:
    TABLE[report.OVER_MPI] = Stack(
        "keras3.py",
        "both",
        "horovodrun",
        twin=report.OURS[report.OVER_MPI],
        environment="mpi",
        flags=("--mpi",),
    )

# One global batch, shared by two ranks or by two devices of one process.
SAME_BATCH = {
    report.SHARED: Stack("same_batch.py", "keras_dist", "horovodrun"),
    "one process": Stack("same_batch.py", "one", "python", ranks=1),
    "MirroredStrategy": Stack("same_batch.py", "mirrored", "python", ranks=1),
    "keras.distribution on JAX": Stack("same_batch.py", "jax", "python", ranks=1),
}

# Memory of a rank, and seconds until its first step: each in processes of its own.
COSTS = {
    f"{method}, {ranks}": Stack("keras3.py", method, launcher, ranks=ranks)
    for ranks, launcher in ((1, "python"), (2, "horovodrun"))
    for method in ("keras_dist", "alone")
}
COSTS_OPTIONS = ["--scale", "0.2", "--models", "mlp"]


def make_environments() -> None:
    """Install what the peers need and keras_dist does not, if it is missing."""
    version = ".".join(metadata.version("tensorflow").split(".")[:2])
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    for folder, packages in {
        "keras2": ["--no-deps", f"tf-keras=={version}.*"],
        "plot": ["matplotlib"],
        "jax": ["jax==0.10.2"],
        "torch": ["torch==2.13.0", "numpy"],
    }.items():
        target = ENVIRONMENTS / folder
        if not target.is_dir():
            print(f"installing {' '.join(packages)} in {target}", flush=True)
            subprocess.run([*pip, "--target", str(target), *packages], check=True)
    make_mpi()


def make_mpi() -> None:
    """An environment as our own, in which Horovod is built with MPI, if it is there."""
    target = ENVIRONMENTS / "mpi"
    if not HAS_MPI or (target / ".ready").exists():
        return
    print(f"building Horovod with MPI in {target}", flush=True)
    python = str(target / "bin" / "python")
    versions = [f"{n}=={metadata.version(n)}" for n in ("tensorflow", "keras", "numpy")]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(target)],
        [python, "-m", "pip", "install", "--quiet", "-e", str(ROOT), *versions],
        [python, "-m", "keras_dist", "install-horovod", "--mpi", "--no-nccl"],
    ):
        subprocess.run(command, check=True)
    (target / ".ready").touch()


def run(
    stack: Stack, options: list[str], variables: dict[str, str] | None = None
) -> dict[tuple[str, str], list[dict]]:
    """Train all models once.

    Args:
        stack: What is started.
        options: Of the script.
        variables: Of the environment.

    Returns:
        What each rank has measured, by ("own" or "twin", name of the model).
    """
    script = [str(STACKS / stack.script), stack.method, *options]
    ranks, env = stack.ranks, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if "--mpi" in stack.flags and os.geteuid() == 0:  # Open MPI asks whether it may
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= variables or {}
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    # Ours chooses for itself.
    if stack.script not in ("keras3.py", "same_batch.py") and ranks > 1:
        env["OMP_NUM_THREADS"] = threads
    paths = {"keras2.py": "keras2", "torch_ddp.py": "torch"}
    folder = "jax" if stack.method == "jax" else paths.get(stack.script)
    path = [str(ENVIRONMENTS / folder)] if folder else []
    if stack.script == "keras2.py":
        env["TF_USE_LEGACY_KERAS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([*path, str(ROOT)])
    python = Path(sys.executable)
    if stack.environment:
        python = ENVIRONMENTS / stack.environment / "bin" / "python"
    command = [str(python), *script]
    if stack.launcher == "horovodrun":
        horovodrun = [str(python.with_name("horovodrun")), *stack.flags]
        commands = [([*horovodrun, "-np", str(ranks), *command], env)]
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
        for line in out.splitlines():
            if MARK in line:
                # mpirun may write more behind it.
                line_of_rank, _ = json.JSONDecoder().raw_decode(line.split(MARK, 1)[1])
                found[line_of_rank["part"], line_of_rank["model"]].append(line_of_rank)
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def rate_of(ranks: list[dict]) -> float:
    """Rows per second of all ranks, by the clock of the slowest one."""
    return ranks[0]["rows"] / max(own["seconds"] for own in ranks)


def rate_in_step(ranks: list[dict]) -> float:
    """The same if each step had begun on all ranks at once: the slowest one's steps."""
    return ranks[0]["rows"] / sum(map(max, *(own["steps"] for own in ranks)))


def parser_of(words: str, *, rounds: int) -> argparse.ArgumentParser:
    """The options of everything that trains the models for some rounds."""
    parser = argparse.ArgumentParser(description=words.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--models", nargs="+", default=list(report.MODELS))
    parser.add_argument("--scale", type=float, default=1, help="of the steps")
    parser.add_argument("--write", action="store_true", help="the document and plot")
    return parser


def main() -> int:
    """Measure, write, and print the files that were written."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--stacks", nargs="+", default=list(TABLE), choices=TABLE)
    parser.add_argument(
        "--costs", action="store_true", help="use the last speeds, measure the rest"
    )
    arguments = parser.parse_args()
    make_environments()
    measured = ENVIRONMENTS / "measured.json"
    begin = time.perf_counter()
    if arguments.costs:
        found = json.loads(measured.read_text())
        rates, facts, shared = found["rates"], found["facts"], found["shared"]
    else:
        tables = {name: TABLE[name] for name in arguments.stacks}, SAME_BATCH
        rates, shared = (speeds(arguments, table) for table in tables)
        facts = {
            "ranks": RANKS,
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "rounds": arguments.rounds,
        }
    if arguments.write or arguments.costs:
        costs = measured_costs(arguments.rounds)
        facts["one rank"] = step_of_one_rank()
        if not arguments.costs:
            facts["minutes"] = (time.perf_counter() - begin) / 60
        measured.write_text(
            json.dumps(
                {"rates": rates, "shared": shared, "facts": facts, "costs": costs}
            )
        )
        report.write(rates, shared, costs, facts)
        env = {**os.environ, "PYTHONPATH": str(ENVIRONMENTS / "plot")}
        plot = [sys.executable, str(Path(__file__).with_name("plot.py"))]
        subprocess.run([*plot, str(measured)], env=env, check=True)
        print("written: docs/performance.md, docs/performance.png")
    return 0


def speeds(
    arguments: argparse.Namespace, table: dict[str, Stack]
) -> dict[str, dict[str, list[float]]]:
    """Rows per second of each round, by model and stack of a table."""
    options = ["--scale", str(arguments.scale), "--models", *arguments.models]
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(arguments.rounds):
        # Another order each round: no stack always follows the same one.
        names = list(table)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for (part, model), ranks in run(table[name], options).items():
                stack = name if part == "own" else table[name].twin
                measured = {stack: rate_of(ranks)}
                if stack == "ceiling":
                    measured[report.IN_STEP] = rate_in_step(ranks)
                for kind, rate in measured.items():
                    rates[model][kind].append(rate)
                    print(f"{number + 1} {kind}, {model}: {rate:,.0f}", flush=True)
    for model, found in rates.items():
        medians = {name: statistics.median(values) for name, values in found.items()}
        print(model, {name: round(value) for name, value in medians.items()})
        if "keras_dist" in found:
            ratio = report.ratio(found, "keras_dist", "ceiling")
            print(
                f"  of the ceiling: {ratio.median:.3f} ({ratio.low:.3f} to "
                f"{ratio.high:.3f})"
            )
    return rates


def measured_costs(rounds: int) -> dict[str, dict[str, list[float]]]:
    """MiB of memory and seconds to the first step in each round, by `COSTS`."""
    costs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for name, stack in COSTS.items():
            ranks = run(stack, COSTS_OPTIONS)["own", "mlp"]
            costs["memory"][name].append(max(own["memory"] for own in ranks) / 2**20)
            costs["first step"][name].append(max(own["first_step"] for own in ranks))
    return costs


def step_of_one_rank() -> dict[str, float]:
    """Processor seconds that one rank adds to a step, and those of a small CNN's."""
    script = str(Path(__file__).with_name("one_rank.py"))
    done = subprocess.run(
        [sys.executable, script, "--pairs", "5"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
        check=False,  # it fails if the claim does not hold
    )
    return json.loads(done.stdout.split(MARK, 1)[1])


if __name__ == "__main__":
    sys.exit(main())
