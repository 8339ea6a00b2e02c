"""The third stage: are sums, broadcasts and gathers right, and how fast are they?

Their speed between hosts is compared with that of a plain connection.
"""

import argparse
import contextlib
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

from keras_dist import comm
from keras_dist.launch.network import addresses
from keras_dist.tools.check import gpus
from keras_dist.tools.check.checks import (
    Found,
    Reporting,
    failed,
    ok,
    untried,
    warning,
)

_DTYPES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "uint8", "int32", "int64", "bool"),
)
_SMALLEST, _LARGEST, _LARGEST_QUICK = 4, 100_000_000, 16_000_000
_LATENCIES, _REPEATS = 50, 3

# What a plain connection reaches of a card's nominal rate where all is right: less than
# the first is a fault, less than the second is to be looked at. And what a sum reaches
# of a plain connection.
_FAULT, _LOW, _LOW_OF_PLAIN = 0.1, 0.2, 0.1

# What a sum reaches at least of the link between GPUs of one host.
_LOW_OF_LINK = 0.05

# Bytes per second of a network whose card does not say its rate, as in a cloud.
_LEAST = 0.125e9

# Numbers of a tensor that are repeated, and ranks whose sum fits into int8.
_PERIOD, _MOST_SUMMED = 7, 16

# Bytes of a try, the most tries, and seconds after which there is no more.
_BYTES, _TRIES, _SECONDS = 16_000_000, 8, 5.0

_CHUNK, _TIMEOUT, _TOKEN = 1 << 20, 60.0, 16

_Collective = Callable[[str, int], bool]


def run(options: argparse.Namespace) -> None:
    """Try the checks of this stage; all ranks call it."""
    comm.init()
    report = Reporting("collectives", options.checks)
    largest = _LARGEST_QUICK if options.quick else _LARGEST
    report.check("transport", transport)
    report.check("sum", _right, "sum", _is_sum_right, largest)
    report.check("broadcast", _right, "broadcast", _is_broadcast_right, largest)
    report.check("gather", _right, "gather", _is_gather_right, largest // comm.size())
    report.check("latency", latency)
    report.check("bandwidth", bandwidth, largest)


def transport() -> Found:
    """Check which transport carries tensors, and that NCCL is used if it is built."""
    name = comm.transport_name()
    number = comm.nccl_version() if comm.size() > 1 else 0
    has_gpu = comm.device().kind == "GPU"
    if number and not has_gpu:
        return warning(
            f"{name}; Horovod is built with NCCL, which is not used: no rank has a GPU",
            "See the line `device`: TensorFlow has to see the GPUs.",
        )
    if has_gpu and not number and comm.size() > 1:
        return warning(
            f"{name}; gradients of GPUs go through the memory of the CPU",
            "keras-dist install-horovod --nccl",
        )
    if comm.size() == 1:
        return untried("one rank sends nothing")
    if comm.has_mpi() and comm.init().num_hosts == 1:
        return ok("MPI, shared memory", transport=name)
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    return ok(f"{name}, interface {interface or 'unknown'}", transport=name)


def _right(what: str, collective: _Collective, largest: int) -> Found:
    """Check that a collective gives the right numbers for all dtypes and sizes."""
    sizes = [_SMALLEST, 4096, 2**20, largest]
    tries = [(dtype, 1000) for dtype in _DTYPES]
    tries += [("float32", max(1, size // 4)) for size in sizes]
    wrong = [
        f"{dtype} of {count} numbers on rank {comm.rank()}"
        for dtype, count in tries
        if not collective(dtype, count)
    ]
    of_all = [text for each in comm.gather(wrong) for text in each]
    if of_all:
        return failed(
            f"the {what} has wrong numbers: {'; '.join(of_all[:4])}",
            "Horovod's library is broken, or the network corrupts data: build it anew "
            "with keras-dist install-horovod, and try with `-np 2` on each host.",
        )
    if comm.size() == 1:
        return untried("one rank sends nothing")
    sizes_text = f"{_SMALLEST} B to {largest / 1e6:g} MB"
    return ok(f"right numbers: {len(_DTYPES)} dtypes, {sizes_text}", bytes=sizes)


def _is_sum_right(dtype: str, count: int) -> bool:
    # Only of the first ranks, since more would not fit into int8.
    ranks = range(min(comm.size(), _MOST_SUMMED))
    own = _pattern(comm.rank(), dtype) * (comm.rank() in ranks)
    expected = sum(_pattern(rank, dtype) for rank in ranks)
    return _is_equal(comm.sum(_numbers(own, dtype, count)), expected)


def _is_broadcast_right(dtype: str, count: int) -> bool:
    root = comm.size() - 1
    own = _numbers(_pattern(comm.rank(), dtype), dtype, count)
    return _is_equal(comm.broadcast(own, root), _pattern(root, dtype))


def _is_gather_right(dtype: str, count: int) -> bool:
    own = _numbers(_pattern(comm.rank(), dtype), dtype, count)
    if dtype == "float32":  # as the rows of an `Embedding` are sent
        found = tf.split(comm.gather_rows(own, name="keras_dist.check"), comm.size())
    else:
        found = comm.gather(own)
    patterns = [_pattern(rank, dtype) for rank in range(comm.size())]
    return all(map(_is_equal, found, patterns))


def _pattern(rank: int, dtype: str) -> Any:
    """Return small numbers that the tensors of a rank repeat, exact in every dtype."""
    numbers = (np.arange(_PERIOD) * 3 + rank) % _PERIOD
    return (numbers % 2 if dtype == "bool" else numbers).astype("int8")


def _numbers(pattern: Any, dtype: str, count: int) -> Any:
    return tf.cast(tf.constant(np.resize(pattern, count)), dtype)


def _is_equal(tensor: Any, pattern: Any) -> bool:
    expected = _numbers(pattern, tensor.dtype, int(tf.size(tensor)))
    return bool(tf.reduce_all(tensor == expected))


def latency() -> Found:
    """Measure how long a sum of one number takes."""
    if comm.size() == 1:
        return untried("one rank sends nothing")
    times = _times(tf.zeros([1]), _LATENCIES)
    median = max(comm.gather(statistics.median(times)))
    return ok(
        f"{median * 1e3:.2f} ms for 4 B (median, slowest rank)",
        milliseconds=median * 1e3,
    )


def bandwidth(largest: int) -> Found:
    """Measure how many bytes a second a large sum moves, and compare."""
    if comm.size() == 1:
        return untried("one rank sends nothing")
    seconds = max(comm.gather(min(_times(tf.zeros([largest // 4]), _REPEATS))))
    # Without what does not grow with the size.
    seconds -= min(seconds / 2, min(comm.gather(min(_times(tf.zeros([1]), _REPEATS)))))
    # Bytes that each rank sends at the least, with any algorithm (Patarasuk and Yuan,
    # 2009): rates of different numbers of ranks can be compared.
    rate = 2 * (comm.size() - 1) / comm.size() * largest / seconds
    seen = f"{rate / 1e9:.3g} GB/s with {largest / 1e6:g} MB"
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if interface == "lo":
        return _on_one_host(rate, seen)
    return between_hosts(rate, seen, plain_rate(), _nominal(interface))


def _on_one_host(rate: float, seen: str) -> Found:
    device = comm.device()
    has_nccl = device.kind == "GPU" and comm.nccl_version() > 0
    listed = gpus.gpus() if has_nccl else []
    own = gpus.uuid_of_rank(listed, index=device.index, has_gpu=True) if listed else ""
    used = comm.gather(own)
    known = [gpu for gpu in listed if gpu.uuid in used]
    return between_gpus(rate, seen, comm.broadcast(gpus.link_of(known)))


def between_gpus(rate: float, seen: str, link: gpus.Link) -> Found:
    """Check that a sum on one host is as fast as its GPUs' link lets expect.

    Args:
        rate: Bytes per second of a large sum.
        seen: The same in words.
        link: What links the GPUs; without a rate: they send over loopback.
    """
    data = {"bytes_per_second": rate, "nominal": link.rate}
    if not link.rate:
        return ok(f"{seen}; loopback of one host, which has no nominal rate", **data)
    seen += f"; {link.words}"
    if link.fault:
        cure = "See that the card sits firmly in a slot of as many lanes."
        return warning(f"{seen}; {link.fault}", cure, **data)
    if rate < _LOW_OF_LINK * link.rate:
        cure = "NCCL may take another path: NCCL_DEBUG=INFO says which, and why."
        return warning(seen, cure, **data)
    return ok(seen, **data)


def between_hosts(
    rate: float, seen: str, plain: float, nominal: tuple[float, str]
) -> Found:
    """Check that the network is as fast as its cards, and that collectives use it.

    Args:
        rate: Bytes per second of a large sum.
        seen: The same in words.
        plain: Bytes per second of a plain connection between two hosts.
        nominal: Those of the slowest card, and what it is.
    """
    most, card = nominal
    seen += (
        f"; a plain connection between hosts reaches {plain / 1e9:.3g} GB/s, "
        f"{plain / most:.0%} of {most / 1e9:.3g} GB/s ({card})"
    )
    data = {"bytes_per_second": rate, "plain": plain, "nominal": most}
    cure = (
        "Measure the network itself (iperf3 between the hosts). A slow one is for "
        '`sync="every:8"` or compression="bf16"; a wrong one for `--address`.'
    )
    if plain < _FAULT * most:
        return failed(seen, cure, **data)
    if plain < _LOW * most:
        return warning(seen, cure, **data)
    if rate < _LOW_OF_PLAIN * plain:
        cure = "Are all cores busy? The threads that send need some of their time."
        return warning(seen, cure, **data)
    return ok(seen, **data)


def _times(tensor: Any, count: int) -> list[float]:
    times = []
    for _ in range(1 + count):
        begin = time.perf_counter()
        comm.total(tensor, purpose="check")
        times.append(time.perf_counter() - begin)
    return times[1:]


def _nominal(interface: str) -> tuple[float, str]:
    """Return bytes per second of the slowest card of all hosts, and what it is."""
    card = psutil.net_if_stats().get(interface)
    slowest = min(comm.gather(card.speed * 1e6 / 8 if card is not None else 0.0))
    if slowest <= 0:
        return _LEAST, f"1 Gbit/s, since {interface} has no nominal rate"
    return slowest, f"{interface}: {slowest * 8e-9:g} Gbit/s"


def plain_rate() -> float:
    """Measure bytes per second from each host to the next by a plain connection.

    The best of some tries counts, since other processes may have the cores meanwhile.
    All ranks call it; the first one of each host takes part.

    Returns:
        The rate of the slowest pair of hosts; 0 if there is one host.

    Raises:
        OSError: If a host cannot be reached.
    """
    is_first = comm.local_rank() == 0
    address = addresses().get(os.environ.get("HOROVOD_GLOO_IFACE", ""), "")
    receiver = _Receiver(address) if is_first else None
    own = (address, receiver.port, receiver.token) if receiver else None
    hosts = [(rank, host) for rank, host in enumerate(comm.gather(own)) if host]

    def measured() -> float:
        if not is_first or len(hosts) == 1:
            return 0.0
        number = [rank for rank, _ in hosts].index(comm.rank())
        return _rate(*hosts[(number + 1) % len(hosts)][1])

    rates = comm.gather_or_raise(measured)
    if receiver is not None:
        receiver.close()
    return min([rate for rate in rates if rate], default=0.0)


class _Receiver:
    """Read what another host of this job sends, and acknowledge each try."""

    def __init__(self, address: str) -> None:
        self.token = secrets.token_bytes(_TOKEN)
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._receive, daemon=True).start()

    def close(self) -> None:
        """Stop reading."""
        self._socket.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._socket.accept()
                with link, contextlib.suppress(OSError):
                    link.settimeout(_TIMEOUT)
                    if link.recv(_TOKEN, socket.MSG_WAITALL) == self.token:
                        self._answer(link)

    def _answer(self, link: socket.socket) -> None:
        left, buffer = _BYTES, bytearray(_CHUNK)
        while count := link.recv_into(buffer):
            left -= count
            if not left:
                link.sendall(b"\1")
                left = _BYTES


def _rate(address: str, port: int, token: bytes) -> float:
    """Measure bytes per second to a receiver."""
    data = bytes(_BYTES)
    begin = time.monotonic()
    rates: list[float] = []
    with socket.create_connection((address, port), _TIMEOUT) as link:
        link.sendall(token)
        while len(rates) < _TRIES and time.monotonic() - begin < _SECONDS:
            start = time.perf_counter()
            link.sendall(data)
            if not link.recv(1):
                raise ConnectionError("the other host reads no more")
            rates.append(_BYTES / (time.perf_counter() - start))
    return max(rates)
