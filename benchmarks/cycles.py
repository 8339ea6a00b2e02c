"""When Horovod looks for tensors: at once, or every few milliseconds.

    python benchmarks/cycles.py [--rounds 3] [--transport gloo|mpi]

Two ranks on this machine, with our change to Horovod (install/patches/prompt_cycles)
and with its own cycles, in turn. Prints medians, smallest and largest.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import report

RANK = Path(__file__).parent / "stacks" / "cycles_rank.py"
SETTINGS = {
    "at once": {"KERAS_DIST_LONGEST_CYCLE_MS": "10"},
    "every 2.5 ms": {"HOROVOD_CYCLE_TIME": "2.5"},
    "every 1 ms": {"HOROVOD_CYCLE_TIME": "1"},
}
COLUMNS = (
    "sum of a number, ms",
    "idle rank, % of a core",
    "step with 8 synchronized normalizations, ms",
    "processor in it, ms",
)


def main() -> None:
    """Measure all settings in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", default="gloo", choices=("gloo", "mpi"))
    arguments = parser.parse_args()
    found: dict[str, list] = {name: [] for name in SETTINGS}
    for _ in range(arguments.rounds):
        for name, variables in SETTINGS.items():
            found[name].append(launched(arguments.transport, variables))
            print(name, *(f"{value:.2f}" for value in found[name][-1]), flush=True)
    print(f"| looks for tensors | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for name, rounds in found.items():
        cells = map(report.spread, zip(*rounds, strict=True))
        words = [f"{s.median:.1f} ({s.low:.1f} to {s.high:.1f})" for s in cells]
        print(f"| {name} | {' | '.join(words)} |")


def launched(transport: str, variables: dict[str, str]) -> list[float]:
    """What two ranks have measured."""
    command = [sys.executable, "-m", "keras_dist", "run", "--transport", transport]
    done = subprocess.run(
        [*command, "-np", "2", str(RANK)],
        env={**os.environ, **variables, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    for line in done.stdout.splitlines():
        if "measured: " in line:
            return [float(word) for word in line.split("measured: ")[1].split()]
    raise RuntimeError(f"The ranks failed.\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
