"""The cost of more ranks and more layers: counted, measured, and predicted.

    make growth

Writes docs/growth.md and docs/growth.png. Several ranks on few cores take turns, so the
measured times here grow with the ranks for that reason too.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import compare
from growth_page import table, write_first

ROOT = Path(__file__).parents[1]
MARK = "measured: "
RANKS = (1, 2, 3, 4, 6, 8)
LAYERS = (2, 8, 32)

# Bytes of the gradients. Seconds that a rank computes in a step: of our three models as
# measured here, of ResNet-50 assumed (64 images at 400 a second, an older GPU).
MODELS = {
    "small CNN": 4 * 225_034,
    "MLP": 4 * 5_824_522,
    "wide residual network": 4 * 77_850,
    "ResNet-50": 4 * 25_600_000,
}
RESNET_SECONDS = 64 / 400

_WORDS = """# Growth

Written by `make growth`; do not edit.

## Counted

Collectives of an update, and bytes of gradients that a rank hands to them, by the
number of layers (dense, of 16 numbers) and of ranks:

{counted}

A gradient of 4 MiB and more is sent alone, at most sixteen of an update are, and all
others are packed: no update has more than seventeen collectives a dtype. To sum S
bytes a rank sends 2 (N − 1) / N × S, less than 2 S on any number of ranks N.

## Measured on this machine

Milliseconds to sum the gradients of an update over all ranks, without other work, on
{cores} cores (medians of {repetitions}; {transport}):

{measured}

## Predicted

![Predicted efficiency](growth.png)

The fraction of a step in which a rank computes, if no averaging overlaps with the
computing: c / (c + L + 2 (N − 1) h + 2 (N − 1) / N × S / B), for a ring.

| assumption | value | from |
|---|---|---|
{assumptions}

One rank on each host, alone on its network card. A ring has 2 (N − 1) steps one after
the other, so at 1,024 ranks the latency decides; NCCL and MPI change to trees there and
lose less than this. Stragglers, which are not predicted, cost more with each rank.
"""


def main() -> None:
    """Start the ranks, and write their measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    compare.make_environments()
    by_size = {}
    for ranks in RANKS:
        by_size[ranks] = launch(ranks, arguments.repetitions)
        print(ranks, by_size[ranks], flush=True)
    hop = ping_pong()
    write(by_size, hop, arguments.repetitions)


def launch(ranks: int, repetitions: int) -> dict:
    """The measurements of the first of so many ranks."""
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    sizes = json.dumps({"one number": 4, **MODELS})
    script = str(Path(__file__).parent / "stacks" / "growth_rank.py")
    command = [sys.executable, script, json.dumps(LAYERS), sizes, str(repetitions)]
    done = subprocess.run(
        [horovodrun, "--gloo", "-np", str(ranks), *command],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    for line in done.stdout.splitlines():
        if MARK in line:
            return json.loads(line.split(MARK, 1)[1])
    raise RuntimeError(f"{ranks} ranks failed.\n{done.stdout}\n{done.stderr}")


def ping_pong(times: int = 2000) -> float:
    """Seconds that a few bytes take to another process of this machine, by TCP."""
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        with socket.create_connection(server.getsockname()) as far:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := far.recv(4):
                far.sendall(data)
        os._exit(0)
    near, _ = server.accept()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own = []
    for _ in range(times):
        begin = time.perf_counter()
        near.sendall(b"ping")
        near.recv(4)
        own.append((time.perf_counter() - begin) / 2)
    near.close()
    server.close()
    os.waitpid(child, 0)
    return statistics.median(own)


def write(by_size: dict, hop: float, repetitions: int) -> None:
    """The document, and the plot."""
    rows = [
        [str(layers)]
        + [
            "{} of {:,} B".format(*by_size[ranks]["counted"][str(layers)])
            for ranks in RANKS[1:]
        ]
        for layers in LAYERS
    ]
    counted = table(["layers", *[f"{n} ranks" for n in RANKS[1:]]], rows)
    names = list(by_size[2]["times"])
    measured = table(
        ["gradients of", *[f"{n} ranks" for n in RANKS[1:]]],
        [
            [name, *[f"{by_size[n]['times'][name] * 1e3:.1f}" for n in RANKS[1:]]]
            for name in names
        ],
    )
    seconds = computing_seconds()
    fixed = by_size[2]["times"]["one number"]
    assumptions = [
        ("L, of a collective", f"{fixed * 1e3:.2f} ms", "one number, 2 ranks, above"),
        ("h, of a hop", f"{hop * 1e6:.0f} µs", "TCP ping-pong on this machine"),
        ("B", "10, 25, 100 Gb/s", "the network's nominal rate"),
    ]
    for name, value in seconds.items():
        source = "assumed" if name == "ResNet-50" else "the ceiling, on two ranks"
        size = MODELS[name] / 1e6
        assumptions.append(
            (f"{name}: S, c", f"{size:.1f} MB, {value * 1e3:.0f} ms", source)
        )
    document = _WORDS.format(
        counted=counted,
        measured=measured,
        cores=len(os.sched_getaffinity(0)),
        repetitions=repetitions,
        transport=by_size[2]["transport"],
        assumptions="\n".join(f"| {a} | {b} | {c} |" for a, b, c in assumptions),
    )
    write_first(document)
    facts = {"sizes": MODELS, "seconds": seconds, "fixed": fixed, "hop": hop}
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".bench" / "plot")}
    plot = [sys.executable, str(Path(__file__).with_name("growth_plot.py"))]
    subprocess.run([*plot, json.dumps(facts)], env=env, check=True)


def computing_seconds() -> dict[str, float]:
    """Of a step of each model: those of the ceiling of `make bench`, measured now."""
    ranks = compare.run(compare.TABLE["keras_dist"], [])
    keys = {"small CNN": "cnn", "MLP": "mlp", "wide residual network": "wide_resnet"}
    found = {
        name: 2 * 128 / compare.rate_of(ranks["twin", key])
        for name, key in keys.items()
    }
    return found | {"ResNet-50": RESNET_SECONDS}


if __name__ == "__main__":
    main()
