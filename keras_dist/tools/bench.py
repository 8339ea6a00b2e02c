"""Latency and bandwidth of allreduce, by size: `keras-dist bench-collectives`."""

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from keras_dist import comm

SIZES = tuple(4 * 16**power for power in range(7))  # bytes: 4 to 64 Mi
_LARGE = 2**20  # bytes, from which a tenth of the repetitions is enough
_RANK = re.compile(r"^\[\d+\] ")


@dataclass(frozen=True)
class Speed:
    """Speed of an allreduce of one size.

    Args:
        num_bytes: Size of each rank's tensor, float32.
        seconds: Median duration on the slowest rank.
        ranks: Number of ranks.
    """

    num_bytes: int
    seconds: float
    ranks: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each rank sends, and receives, with the best algorithm.

        On n ranks an allreduce sends at least 2 (n − 1) / n times the tensor, with any
        algorithm (Patarasuk and Yuan, 2009). Counted so, bandwidths of different
        numbers of ranks can be compared.

        >>> Speed(num_bytes=1000, seconds=0.5, ranks=4).bandwidth
        3000.0
        """
        return 2 * (self.ranks - 1) / self.ranks * self.num_bytes / self.seconds


def measure(sizes: Sequence[int], repetitions: int) -> list[Speed]:
    """Measure allreduce of tensors of some sizes; every rank calls this.

    Args:
        sizes: Size of each tensor in bytes.
        repetitions: Number of repetitions of each size, after two that do not count;
            large tensors get a tenth of them.
    """
    speeds = []
    for num_bytes in sizes:
        tensor = tf.zeros([num_bytes // 4])
        times = []
        count = repetitions if num_bytes < _LARGE else -(-repetitions // 10)
        for _ in range(2 + count):
            begin = time.perf_counter()
            comm.total(tensor, purpose="bench")
            times.append(time.perf_counter() - begin)
        seconds = max(comm.gather(statistics.median(times[2:])))
        speeds.append(Speed(num_bytes, seconds, comm.size()))
    return speeds


def table(speeds: Sequence[Speed]) -> str:
    """Return a table with a line for each size.

    >>> print(table([Speed(64 * 2**20, 0.5, 2)]))
          size      latency   bandwidth
        64 MiB    500.00 ms   0.13 GB/s
    """
    lines = [f"{'size':>10}{'latency':>13}{'bandwidth':>12}"]
    for speed in speeds:
        latency = f"{speed.seconds * 1e3:.2f} ms"
        rate = f"{speed.bandwidth / 1e9:.2f} GB/s"
        lines.append(f"{_size(speed.num_bytes):>10}{latency:>13}{rate:>12}")
    return "\n".join(lines)


def run(ranks: int, repetitions: int) -> int:
    """Measure and print the table, and return the exit code.

    Args:
        ranks: Number of ranks to start if no launcher has started this process.
        repetitions: Number of repetitions of each size.

    Raises:
        ValueError: If `ranks` or `repetitions` is too small.
        RuntimeError: If Horovod cannot be used.
    """
    if repetitions < 1 or ranks < 2:
        raise ValueError(
            "At least two ranks and one repetition are needed. "
            f"Received: -np {ranks} --repetitions {repetitions}"
        )
    if comm.size() == 1:
        return _launch(ranks, repetitions)
    _run_here(repetitions)
    return 0


def _run_here(repetitions: int) -> None:
    speeds = measure(SIZES, repetitions)
    if comm.rank() == 0:
        title = f"{comm.size()} ranks, {comm.transport_name()}, sums of float32"
        print(f"{title}\n{table(speeds)}", flush=True)


def _launch(ranks: int, repetitions: int) -> int:
    """Start ranks once for each transport that Horovod was built with."""
    failures = 0
    for name in comm.built_transports():
        done = subprocess.run(
            [sys.executable, "-m", "keras_dist", "run", "-np", str(ranks)]
            + ["--transport", name, "-m", "keras_dist", "bench-collectives"]
            + ["--repetitions", str(repetitions)],
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
            capture_output=True,
            text=True,
        )
        failures += done.returncode != 0
        print("\n".join(_RANK.sub("", line) for line in done.stdout.splitlines()))
        if done.returncode != 0:
            print(done.stderr[-3000:], file=sys.stderr)
            print(
                f"keras-dist: the measurement with {name} failed. The end of its "
                "output is printed above.",
                file=sys.stderr,
            )
    return 1 if failures else 0


def _size(num_bytes: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"
