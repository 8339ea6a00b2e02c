"""Local SGD beside full synchronization, on a network made slow.

    make slow-network

As root, on Linux: two ranks in two network namespaces, between which a token bucket
(`tc`) lets so many bits a second through. Writes docs/slow_network.md.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "measured: "
HOSTS = ("kd-a", "kd-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("kd-va", "kd-vb")
SERVER = """
import sys
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
server = RendezvousServer(0)
port = server.start()
server.init(get_host_assignments(parse_hosts("kd-a:1,kd-b:1"), 2))
print(port, flush=True)
sys.stdin.read()
"""

# When the ranks synchronize: `sync` and `outer_momentum`.
SETTINGS = {
    "each step": ("every:1", 0.0),
    "every 8 steps": ("every:8", 0.0),
    "every 8 steps, outer momentum 0.5": ("every:8", 0.5),
    "every 32 steps": ("every:32", 0.0),
}

_WORDS = """# Local SGD on a slow network

Written by `make slow-network`; do not edit. Two ranks on {cores} cores, between which
{rate} go through in each direction. Fashion-MNIST, {rows:,} rows an epoch, the small
CNN of `make bench` (0.9 MB of gradients), 128 rows a batch and rank, SGD with momentum,
{epochs} epochs; all settings were measured in each of {rounds} rounds, with another
seed in each: medians (smallest to largest).

| averaging | seconds an epoch, after the first | accuracy on 10,000 test rows |
|---|---|---|
{table}
"""


def main() -> None:
    """Create the network, measure, write, and delete the network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit", help="as `tc` takes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=30_000)
    arguments = parser.parse_args()
    measured = {setting: [] for setting in SETTINGS}
    with network(arguments.rate):
        for number in range(arguments.rounds):
            for setting, (sync, momentum) in SETTINGS.items():
                options = [sync, momentum, arguments.epochs, arguments.rows, number]
                measured[setting].append(train([str(option) for option in options]))
                print(number + 1, setting, measured[setting][-1], flush=True)
    lines = []
    for setting, found in measured.items():
        seconds, accuracies = zip(*found, strict=True)
        lines.append(
            f"| {setting} | {statistics.median(seconds):.1f} "
            f"({min(seconds):.1f} to {max(seconds):.1f}) "
            f"| {statistics.median(accuracies):.3f} "
            f"({min(accuracies):.3f} to {max(accuracies):.3f}) |"
        )
    words = _WORDS.format(
        table="\n".join(lines),
        cores=len(os.sched_getaffinity(0)),
        rate=arguments.rate.replace("mbit", " Mb/s"),
        rows=arguments.rows,
        epochs=arguments.epochs,
        rounds=arguments.rounds,
    )
    (ROOT / "docs" / "slow_network.md").write_text(words)


@contextlib.contextmanager
def network(rate: str):
    """Inside the block there are two hosts and a slow link."""
    # Gloo looks up the name of its host; `ip netns exec` puts these files over /etc.
    folders = [Path("/etc/netns") / host for host in HOSTS]
    try:
        for host, folder, address in zip(HOSTS, folders, ADDRESSES, strict=True):
            run("ip", "netns", "add", host)
            folder.mkdir(parents=True)
            names = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            (folder / "hosts").write_text(names)
        run(
            *("ip", "link", "add", INTERFACES[0], "netns", HOSTS[0], "type", "veth"),
            *("peer", "name", INTERFACES[1], "netns", HOSTS[1]),
        )
        for host, address, interface in zip(HOSTS, ADDRESSES, INTERFACES, strict=True):
            run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", interface)
            for name in (interface, "lo"):
                run("ip", "-n", host, "link", "set", name, "up")
            bucket = ["rate", rate, "burst", "64kb", "latency", "50ms"]
            run(
                *("tc", "-n", host, "qdisc", "add", "dev", interface),
                *("root", "tbf", *bucket),
            )
        yield
    finally:
        for host, folder in zip(HOSTS, folders, strict=True):
            subprocess.run(["ip", "netns", "del", host], check=False)
            shutil.rmtree(folder, ignore_errors=True)


def run(*command: str) -> None:
    """Run a command; an error if it fails."""
    subprocess.run(command, check=True)


def train(options: list[str]) -> tuple[float, float]:
    """Seconds of an epoch and the accuracy at the end, from the first rank."""
    inside = [["ip", "netns", "exec", host, sys.executable] for host in HOSTS]
    server = subprocess.Popen(
        [*inside[0], "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    ranks = []
    try:
        port = server.stdout.readline().strip()
        script = str(Path(__file__).parent / "stacks" / "slow_rank.py")
        for rank, start in enumerate(inside):
            variables = {
                "HOROVOD_RANK": rank,
                "HOROVOD_SIZE": 2,
                "HOROVOD_LOCAL_RANK": 0,
                "HOROVOD_LOCAL_SIZE": 1,
                "HOROVOD_CROSS_RANK": rank,
                "HOROVOD_CROSS_SIZE": 2,
                "HOROVOD_HOSTNAME": HOSTS[rank],
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": ADDRESSES[0],
                "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
                "HOROVOD_GLOO_IFACE": INTERFACES[rank],
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "TF_NUM_INTRAOP_THREADS": 1,
                "TF_CPP_MIN_LOG_LEVEL": 3,
                "PYTHONPATH": ROOT,
            }
            env = {
                **os.environ,
                **{name: str(value) for name, value in variables.items()},
            }
            ranks.append(
                subprocess.Popen(
                    [*start, script, *options],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=600) for process in ranks]
    finally:
        for process in [*ranks, server]:
            process.kill()
            process.wait()
    for line in outputs[0][0].splitlines():
        if MARK in line:
            return tuple(json.loads(line.split(MARK, 1)[1]))
    raise RuntimeError("\n".join(map("\n".join, outputs)))


if __name__ == "__main__":
    main()
