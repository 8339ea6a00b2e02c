"""The cost of more hosts for the launcher: to start, to watch and to end them.

    make growth-hosts

Writes the section "Many hosts" of docs/growth.md, and docs/growth_hosts.png. The
launcher and its store are the real ones; `stacks/stand_in.cc` stands in for ssh, for
the agents and for their ranks, and speaks their protocol. What Horovod itself asks of
the store when ranks connect is counted on real ranks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from growth_page import spread, table, write_section

from keras_dist.launch.hosts import slots
from keras_dist.launch.ranks import Assignment
from keras_dist.launch.store import Store, variables_of
from keras_dist.version import __version__

ROOT = Path(__file__).parents[1]
STAND_IN = Path(__file__).parent / "stacks" / "stand_in.cc"
HOSTS = (8, 16, 32, 64, 125)
RANKS = 8  # of each host
CONNECTED = (2, 4, 8)  # real ranks of one host

# Seconds of each case after the first heartbeat of a host; see `stand_in.cc`.
CASES = {"end": 12, "fail": 3, "lose": 3}
CODES = {"end": 0, "fail": 3, "lose": 1}

_WORDS = """
Written by `make growth-hosts`. `keras-dist run -H` with eight ranks on each host.
Launcher and store are the real ones, on {cores} cores. A program on the same machine
stands in for ssh, the agents and the ranks: it speaks their protocol (a heartbeat of
each host every second, of each rank every five, and a request for orders that the store
holds until there is another one, for five seconds at most), and starts no Python. So
what a host itself needs to connect and to import is not in these numbers. In seconds
(of {rounds}:
median, smallest and largest):

{seconds}

*start*: from the command until all hosts have sent a heartbeat. *A rank fails* and *a
host falls silent*: until all other hosts were asked to end, and until the command had
ended; a host is lost after 15 s of silence. *End*: from the last report of a host until
the command had ended.

Bytes through the first host, without the headers of TCP and with the environment of
this machine, and what the launcher computes:

{bytes}

![Seconds, bytes and cores by number of hosts](growth_hosts.png)

A stall is found by one rank, which reads all heartbeats by one request
(`tests/launch/test_many_hosts.py` counts them).

What Horovod itself asks of the store is another matter. With Gloo, each rank writes an
address for each other one, and reads those of all, two to four times: requests grow
with the square of the ranks, and bytes with the cube. Counted on ranks of one host, and
computed from the largest of these for more:

{horovod}

Gloo is for some dozens of ranks. For hundreds build Horovod with MPI, and start by
`mpirun`, which does not use this store.
"""


def main() -> None:
    """Measure all numbers of hosts in turn, several times, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-print", action="store_true")
    arguments = parser.parse_args()
    found: dict[int, list] = {hosts: [] for hosts in HOSTS}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "stand_in"
        compiler = os.environ.get("CXX", "c++")
        version = f'-DVERSION="{__version__}"'
        words = [compiler, "-O2", "-pthread", version, "-o", program, STAND_IN]
        subprocess.run(words, check=True)
        for number in range(arguments.rounds):
            for hosts in HOSTS:
                found[hosts].append(measured(program, hosts))
                print(number + 1, hosts, found[hosts][-1], flush=True)
    if arguments.only_print:
        return
    connected = {ranks: connecting(ranks) for ranks in CONNECTED}
    print(connected, flush=True)
    write(found, connected, arguments.rounds)


def measured(program: Path, hosts: int) -> dict[str, float]:
    """Seconds and bytes of each case."""
    ended, failed, lost = (launched(program, case, hosts) for case in CASES)
    seconds = min(ended["reported"]) - max(ended["there"])
    moved = sum(ended["sent"]) + sum(ended["received"])
    return {
        "start": max(ended["there"]) - ended["begin"],
        "fail": max(failed["stopped"]) - failed["failed"][0],
        "fail_end": failed["end"] - failed["failed"][0],
        "lose": max(lost["stopped"]) - lost["silent"][0],
        "lose_end": lost["end"] - lost["silent"][0],
        "end": ended["end"] - max(ended["reported"]),
        "message": sum(ended["message"]),
        "bytes": moved / (max(ended["reported"]) - min(ended["there"])),
        "core": ended["cpu"] / seconds,
    }


def launched(program: Path, case: str, hosts: int) -> dict:
    """Run a job of so many hosts to its end; when what happened, on each host."""
    with tempfile.TemporaryDirectory() as folder:
        names = ",".join(f"h{number}:{RANKS}" for number in range(hosts))
        ssh = f"{program} {folder} {case} {CASES[case]}"
        words = ["-m", "keras_dist", "run", "-H", names, "--ssh", ssh]
        begin = time.time()
        process = subprocess.Popen(
            [sys.executable, *words, "--address", "127.0.0.1", "-m", "this"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        cpu = watched(process, Path(folder), hosts) if case == "end" else 0.0
        _, stderr = process.communicate(timeout=300)
        found: dict = {"begin": begin, "end": time.time(), "cpu": cpu}
        if process.returncode != CODES[case]:
            raise RuntimeError(f"{case} on {hosts} hosts failed.\n{stderr}")
        for record in Path(folder).iterdir():
            for line in record.read_text().splitlines():
                name, value = line.split()
                found.setdefault(name, []).append(float(value))
        return found


def watched(process: subprocess.Popen, folder: Path, hosts: int) -> float:
    """Seconds of CPU that the launcher uses from the start of all hosts to the end."""
    launcher, last, first = psutil.Process(process.pid), 0.0, None
    while process.poll() is None:
        records = [path.read_text() for path in folder.iterdir()]
        if any("reported" in text for text in records):
            break
        used = launcher.cpu_times()
        last = used.user + used.system
        if first is None and sum("there" in text for text in records) == hosts:
            first = last
        time.sleep(0.5)
    return last - (first or 0.0)


def connecting(ranks: int) -> tuple[int, int]:
    """Requests and bytes in the store when so many real ranks connect by Horovod."""
    own, counts, lock = slots([("localhost", ranks)]), [0, 0], threading.Lock()
    store = Store()
    handler = store._server.RequestHandlerClass

    class Counting(handler):
        """Counts."""

        def _put_value(self, scope, key, value):
            with lock:
                counts[1] += len(value)
            super()._put_value(scope, key, value)

        def _get_value(self, scope, key):
            value = super()._get_value(scope, key)
            with lock:
                counts[1] += len(value or b"")
            return value

        def parse_request(self):
            with lock:
                counts[0] += 1
            return super().parse_request()

    store._server.RequestHandlerClass = Counting
    try:
        store.open(own, "the secret")
        found = variables_of("127.0.0.1", store.port, "the secret")
        common = Assignment(own, found, "the secret").variables("127.0.0.1")
        code = "import horovod.tensorflow as horovod; horovod.init()"
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, **common, **slot.environment()},
                stderr=subprocess.DEVNULL,
            )
            for slot in own
        ]
        if any([process.wait() for process in started]):
            raise RuntimeError(f"{ranks} ranks failed.")
    finally:
        store.close()
    return counts[0], counts[1]


def write(found: dict, connected: dict, rounds: int) -> None:
    """The section of the page, and the plot."""
    medians = {
        hosts: {name: statistics.median(each[name] for each in own) for name in own[0]}
        for hosts, own in found.items()
    }

    def seconds(hosts: int, name: str) -> str:
        return spread([each[name] for each in found[hosts]])

    head = ["hosts", "ranks", "start", "a rank fails: others asked to end", "ended"]
    head += ["a host falls silent: others asked to end", "ended", "end"]
    names = ("start", "fail", "fail_end", "lose", "lose_end", "end")
    rows = [
        [str(h), f"{h * RANKS:,}", *[seconds(h, name) for name in names]] for h in HOSTS
    ]
    moved = [
        [
            str(hosts),
            f"{own['message'] / 1e3:,.0f} kB",
            f"{own['bytes'] / 1e3:,.0f} kB/s",
            f"{own['core']:.2f}",
        ]
        for hosts, own in medians.items()
    ]
    last = max(connected)
    asked = [
        [str(n), f"{r:,}", f"{b / 1e6:,.2f} MB"] for n, (r, b) in connected.items()
    ]
    for ranks in (64, 256, 1000):
        times = ranks / last
        requests, size = connected[last]
        asked.append(
            [
                f"{ranks:,}, computed",
                f"{requests * times**2:,.0f}",
                f"{size * times**3 / 1e6:,.0f} MB",
            ]
        )
    section = _WORDS.format(
        cores=len(os.sched_getaffinity(0)),
        rounds=rounds,
        seconds=table(head, rows),
        bytes=table(["hosts", "sent at the start", "then", "cores of it"], moved),
        horovod=table(["ranks", "requests", "bytes of addresses"], asked),
    )
    write_section("Many hosts", section)
    folder = ROOT / ".bench" / "plot"
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target"]
        subprocess.run([*pip, str(folder), "matplotlib"], check=True)
    env = {**os.environ, "PYTHONPATH": str(folder)}
    plot = [sys.executable, str(Path(__file__).with_name("growth_hosts_plot.py"))]
    subprocess.run([*plot, json.dumps(medians)], env=env, check=True)


if __name__ == "__main__":
    main()
