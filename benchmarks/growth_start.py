"""Measure how a fit starts on more ranks: seconds, collectives and bytes.

    python benchmarks/growth_start.py

Writes docs/growth.md. The ranks are real ones of this machine.
"""

import argparse
import compileall
import os
import statistics
import sys
import time
from pathlib import Path

from start import ROOT, keras_dist_run, measure

RANK = Path(__file__).parent / "stacks" / "growth_start_rank.py"
ROUNDS = 3
RANKS = (1, 2, 4, 8, 16)

_PAGE = """# The start of a fit

Written by `benchmarks/growth_start.py`; do not edit. A fit of one layer, one epoch of
two steps, on {cores} cores. Seconds from the command to the end of the first step, on
the slowest rank, as medians of {rounds} starts in turn:

| start | seconds |
|---|---|
| plain Keras, by `python` | {plain:.1f} |
| two ranks of `horovodrun` | {horovodrun:.1f} |
| two ranks of `keras-dist run` | {ours:.1f} ({ratio:.2f} × plain Keras) |

With more ranks of `keras-dist run`: seconds since the command, and how many collectives
and bytes the first rank sends in the whole fit:

| ranks | import | connect | first step | fit | collectives | bytes |
|---|---|---|---|---|---|---|
{rows}

A step of this model gathers nothing and sends no Python objects: gradients, stop
requests and row counts are summed.
"""


def main() -> None:
    """Start the ranks, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    ranks_to_try = parser.parse_args().ranks
    compileall.compile_dir(ROOT / "keras_dist", quiet=1)  # as pip does
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "--gloo"]
    starts = {
        "plain": [],
        "horovodrun": [*horovodrun, "-np", "2"],
        "keras-dist": keras_dist_run(2),
    }
    first_steps: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(ROUNDS):
        for name, launcher in starts.items():
            seconds = start(launcher, name)["seconds"]
            first_steps[name].append(seconds["first step"])
    plain, horovodrun_s, ours = map(statistics.median, first_steps.values())
    rows = []
    for ranks in ranks_to_try:
        measured = start(keras_dist_run(ranks), "keras-dist")
        times = measured["seconds"]
        cells = [f"{times[n]:.1f}" for n in ("import", "connect", "first step", "fit")]
        cells += [str(measured["collectives"]), f"{measured['bytes']:,}"]
        rows.append(f"| {ranks} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    page = _PAGE.format(
        cores=len(os.sched_getaffinity(0)),
        rounds=ROUNDS,
        plain=plain,
        horovodrun=horovodrun_s,
        ours=ours,
        ratio=ours / plain,
        rows="\n".join(rows),
    )
    (ROOT / "docs" / "growth.md").write_text(page)


def start(launcher: list[str], name: str) -> dict:
    """What the first rank has measured and counted, since now."""
    return measure(*launcher, sys.executable, str(RANK), name, str(time.time()))


if __name__ == "__main__":
    main()
