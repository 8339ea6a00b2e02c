"""What a lost rank and a lost host cost: seconds until the training goes on.

    make restarts

Writes the section "A lost rank, a lost host" of docs/growth.md. Three hosts of our own
(network namespaces, root), the same command on each, without and with `--spare`.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from growth_page import spread, table, write_section

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "hosts"))

import network  # noqa: E402
from chaos import Job  # noqa: E402

RANK = "benchmarks/stacks/restarts_rank.py"
WAYS = {"": [], "`--spare`": ["--spare"]}

# Seconds: each start is left alone for so long, as the spares begin 20 s after it.
CALM = 60

_WORDS = """
Written by `make restarts`. Three hosts on one machine of {cores} cores, a rank on each,
`--nnodes 2:3`; the small CNN of `make chaos`, {pace} s a step. Seconds from the moment
at which a rank is killed, or a host loses its power, until the first step that was not
made before (of {rounds} in turn: median, smallest and largest). The steps since the
last checkpoint, at most three, are made again in them.

{seconds}

Of a lost host the first 15 s are those after which its silence means that it is lost.
The ranks start on {cores} cores at the same time; on hosts of their own they take less.
"""


class Measured(Job):
    """A job whose ranks can be made to fail."""

    def __init__(self, net, folder, options):
        super().__init__(net, folder, "meet", epochs=0)
        self.options = options

    def words(self, host):
        """The command of a host, the same each time."""
        options = ["--nnodes", "2:3", "--rdzv", "a:29400", "--max-restarts", 100]
        if host != "a":
            options += ["--node-rank", "abc".index(host)]
        own = [self.log, self.pace, self.folder, "/tmp/resume"]
        return [*network.LAUNCH, *options, *self.options, RANK, *own]

    def kill_rank(self):
        """When it was killed."""
        path = self.folder / "killed"
        path.unlink(missing_ok=True)
        (self.folder / "kill.b").touch()
        self.wait(path.exists, "the end of a rank")
        return float(path.read_text())

    def lose_host(self):
        """When it lost its power."""
        now = time.time()
        self.net.power_off("c")
        return now

    def seconds_of(self, loss):
        """From a loss until the first new step."""
        begin = loss()
        steps = self.steps()
        start, step, _ = steps[-1]

        def is_new(each):
            return each[0] != start and each[1] > step

        self.wait(lambda: any(map(is_new, self.steps()[len(steps) :])), "a new step")
        return time.time() - begin


def round_of(net, folder, options):
    """Seconds that a lost rank costs, and a lost host."""
    job = Measured(net, folder, options)
    job.expected = {1, -9, 137}  # of the command on the host that is lost
    job.wait_for_steps(1)
    job.pause(CALM)
    rank = job.seconds_of(job.kill_rank)
    job.pause(CALM)
    host = job.seconds_of(job.lose_host)
    net.restore()
    return rank, host


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-print", action="store_true")
    arguments = parser.parse_args()
    found = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="keras_dist_restarts.") as name:
        folder = Path(name)
        with network.hosts("abc", shared=[folder]) as net:
            for number in range(arguments.rounds):
                for index, (way, options) in enumerate(WAYS.items()):
                    own = folder / f"{number}.{index}"
                    found[way].append(round_of(net, own, options))
                    print(number + 1, way or "without", found[way][-1], flush=True)
                    for host in "abc":
                        net.run(host, ["rm", "-rf", "/tmp/resume"])
    if not arguments.only_print:
        write(found, arguments.rounds)


def write(found, rounds: int) -> None:
    """The section of the page."""
    rows = [
        [way or "without `--spare`", *map(spread, zip(*values, strict=True))]
        for way, values in found.items()
    ]
    section = _WORDS.format(
        cores=len(os.sched_getaffinity(0)),
        pace=0.3,
        rounds=rounds,
        seconds=table(["", "a rank is killed", "a host loses its power"], rows),
    )
    write_section("A lost rank, a lost host", section)


if __name__ == "__main__":
    main()
