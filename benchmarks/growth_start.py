"""The cost of more ranks for the start of a fit: seconds, collectives and bytes.

    make growth-start

Writes the section "The start of a fit" of docs/growth.md. The ranks are real ones of
this machine; bytes for more ranks than it can have are computed from the counted ones.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from growth_page import table, write_section

ROOT = Path(__file__).parents[1]
RANK = Path(__file__).parent / "stacks" / "growth_start_rank.py"
MARK = "measured: "
WAYS = ("plain", "keras-dist", "horovodrun")
ROUNDS = 3
RANKS = (1, 2, 4, 8, 16)
MORE = (64, 256, 1000)
PURPOSES = ("agree", "compare batches", "broadcast", "metrics", "other")

_WORDS = """
Written by `make growth-start`. A fit of one layer, one epoch of two steps, started by
`keras-dist run` on {cores} cores{busy}. Seconds since the command, on the slowest rank:

{seconds}

The same fit by plain Keras, started by `python`, has made its first step after
{plain} s, and on two ranks of `horovodrun` after {horovodrun} s; on two ranks of
`keras-dist run` after {two} s, {ratio} × plain Keras (medians of {rounds} starts of
each, in turn).

Collectives of each rank, and bytes that it hands to them, by what they are for. The
number of collectives does not depend on the number of ranks:

{counted}

*agree*: comparisons and errors of all ranks, one message of at most 1 KiB each; equal
facts are a digest, however many there are. *compare batches*: whether all ranks read
the same data. *metrics*: the reports on metrics, and the sum of their state; once for
each result. *other*: the gradients, and one number for each epoch.

Bytes that a rank receives in all of these, where a gather brings those of all other
ranks, counted on {largest} ranks and computed for more:

{received}

In a step there is no gather and no Python object of another rank: gradients, stop
requests and numbers of rows are sums.
"""


def main() -> None:
    """Start the ranks, and write what they have counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--busy", action="store_true", help="others use the machine")
    arguments = parser.parse_args()
    started = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, seconds in started.items():
            seconds.append(first_step(way))
            print(way, seconds[-1], flush=True)
    found = {}
    for ranks in arguments.ranks:
        found[ranks] = launched(ranks)
        print(ranks, found[ranks], flush=True)
    write(found, started, is_busy=arguments.busy)


def first_step(way: str) -> float:
    """Seconds from a command to the end of its first step, on the slowest rank."""
    bin_folder = Path(sys.executable).parent
    command = [sys.executable, str(RANK.with_name("first_step.py"))]
    if way == "keras-dist":
        launcher = [sys.executable, "-m", "keras_dist", "run", "--transport", "gloo"]
        command = [*launcher, "-np", "2", *command]
    elif way == "horovodrun":
        command = [str(bin_folder / "horovodrun"), "--gloo", "-np", "2", *command]
    begin = time.time()
    done = subprocess.run(
        command,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
        | {"IS_PLAIN": str(int(way == "plain"))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    ends = re.findall(r"measured: (\d+\.\d+)", done.stdout)
    if not ends:
        raise RuntimeError(done.stdout + done.stderr)
    return max(map(float, ends)) - begin


def launched(ranks: int) -> dict:
    """What the first of so many ranks has measured and counted."""
    command = [sys.executable, "-m", "keras_dist", "run", "--transport", "gloo"]
    done = subprocess.run(
        [*command, "-np", str(ranks), str(RANK), str(time.time())],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    for line in done.stdout.splitlines():
        if MARK in line:
            return json.loads(line.split(MARK, 1)[1])
    raise RuntimeError(f"{ranks} ranks failed.\n{done.stdout}\n{done.stderr}")


def received(counted: dict, ranks: int) -> int:
    """Bytes that a rank receives in collectives to which each hands so many."""
    total = 0.0
    for kinds in counted.values():
        for kind, (_, size) in kinds.items():
            if kind == "allgather":
                total += size * (ranks - 1)
            elif kind == "allreduce":
                total += 2 * (ranks - 1) / ranks * size
            else:
                total += size
    return round(total)


def write(found: dict, started: dict, *, is_busy: bool) -> None:
    """The section of the page."""
    first = {way: statistics.median(seconds) for way, seconds in started.items()}
    several = [ranks for ranks in found if ranks > 1]
    largest = max(several)
    names = list(found[largest]["times"])
    seconds = table(
        ["ranks", *names],
        [
            [str(ranks), *[f"{each['times'][name]:.1f}" for name in names]]
            for ranks, each in found.items()
        ],
    )
    rows = []
    for purpose in PURPOSES:
        cells = [sums_of(found[ranks]["counted"].get(purpose, {})) for ranks in several]
        rows.append([purpose, *[f"{calls} of {size:,} B" for calls, size in cells]])
    counted = table(["", *[f"{ranks} ranks" for ranks in several]], rows)
    own = found[largest]["counted"]
    columns = [*several, *MORE]
    sizes = [
        received(found[ranks]["counted"] if ranks in found else own, ranks)
        for ranks in columns
    ]
    section = _WORDS.format(
        cores=len(os.sched_getaffinity(0)),
        busy=", which others used, too" if is_busy else "",
        seconds=seconds,
        plain=f"{first['plain']:.1f}",
        horovodrun=f"{first['horovodrun']:.1f}",
        two=f"{first['keras-dist']:.1f}",
        ratio=f"{first['keras-dist'] / first['plain']:.2f}",
        rounds=ROUNDS,
        counted=counted,
        largest=largest,
        received=table(
            ["ranks", *[f"{n:,}" for n in columns]],
            [["bytes", *[f"{size / 1e3:,.0f} kB" for size in sizes]]],
        ),
    )
    write_section("The start of a fit", section)


def sums_of(kinds: dict) -> tuple[int, int]:
    """Collectives of a purpose, and bytes."""
    return sum(n for n, _ in kinds.values()), sum(size for _, size in kinds.values())


if __name__ == "__main__":
    main()
