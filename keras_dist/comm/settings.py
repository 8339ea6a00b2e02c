"""Settings that a rank makes before Horovod and Open MPI start."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator

from keras_dist.launch.monitor import watchdog
from keras_dist.launch.time_limits import STALL, TimeLimits

# In each cycle of Horovod's thread the ranks exchange a message. By our change to its
# source (tools/install/patches/prompt_cycles.patch) a cycle begins as soon as there is
# a tensor, and else after so many milliseconds. A Horovod without it takes the other.
_LONGEST_CYCLE, _CYCLE = "KERAS_DIST_LONGEST_CYCLE_MS", "HOROVOD_CYCLE_TIME"

# Unless the user has set them.
_ON_CPU = {
    # At Horovod's default of 1 ms the thousand messages per second slow down a core
    # that also computes.
    _CYCLE: "2.5",
    # No fusion by Horovod. Small gradients are packed by us already; fusing large ones
    # that are ready at the same time copies them twice more, into a buffer that stays
    # allocated.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # By our change to its source (tools/install/patches/read_memory.patch) ranks of one
    # host sum large tensors over Gloo by reading each other's memory, if they may.
    "KERAS_DIST_READ_MEMORY": "1",
}


def set_for_cpu() -> None:
    """Set what the user has not set, before Horovod starts."""
    if _CYCLE not in os.environ:
        os.environ.setdefault(_LONGEST_CYCLE, "10")
    for name, value in _ON_CPU.items():
        os.environ.setdefault(name, value)


# Open MPI spins while it waits. On a rank that computes on the CPU, TensorFlow has a
# thread for each core of the rank, from which a spinning thread takes the core.
_YIELD = "OMPI_MCA_mpi_yield_when_idle"

# How ranks of one host copy large messages. Out of the memory of the other process, its
# default, takes longer than through shared memory. XPMEM has no copy at all.
_COPY, _XPMEM = "OMPI_MCA_btl_vader_single_copy_mechanism", "/dev/xpmem"

# Networks between the hosts for large messages: either may be set, not both.
_INCLUDE, _EXCLUDE = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
_DEFAULT_EXCLUDED = ("127.0.0.1/8", "sppp")  # Open MPI's own

# Bridges that container engines and hypervisors make on each host, often with the same
# address on all. Open MPI takes that for a network of all hosts, connects a host to
# itself, and waits forever.
_BRIDGE = re.compile(
    r"(?:docker|virbr|lxcbr|lxdbr|podman|cni|cni-podman|nerdctl)\d+|br-[\da-f]{12}"
)


def prepare(*, is_on_cpu: bool) -> None:
    """Set variables of Open MPI that the user has not set; call it before MPI starts.

    Args:
        is_on_cpu: Whether this rank has no GPU.
    """
    if is_on_cpu:
        os.environ.setdefault(_YIELD, "1")
        if not os.path.exists(_XPMEM):
            os.environ.setdefault(_COPY, "none")
    names = [name for _, name in socket.if_nameindex()]
    bridges = [name for name in names if _BRIDGE.fullmatch(name)]
    if bridges and _INCLUDE not in os.environ:
        os.environ.setdefault(_EXCLUDE, ",".join([*_DEFAULT_EXCLUDED, *bridges]))


@contextlib.contextmanager
def limit_start(rank: int, size: int) -> Iterator[None]:
    """Context manager that ends this rank if it takes longer than the stall limit.

    MPI itself waits forever, and under `mpirun` there is no store in which the ranks
    could see each other.

    Args:
        rank: Rank of this process, for the message.
        size: Number of ranks.
    """
    limit = TimeLimits().stall
    timer = threading.Timer(limit, _end, [rank, size, limit])
    timer.daemon = True
    if limit:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(rank: int, size: int, limit: float) -> None:
    names = ", ".join(name for _, name in socket.if_nameindex())
    message = (
        f"MPI has not connected the ranks for {limit:g} s, and the job ends. Received: "
        f"rank {rank} of {size} on {socket.gethostname()}, with the network interfaces "
        f"{names}. Of several hosts, name the network on which they reach each other: "
        "`mpirun --mca btl_tcp_if_include 10.0.0.0/24`. If another rank needs longer "
        f"before it connects, raise the limit: {STALL}=600.\n"
    )
    os.write(2, f"keras_dist: {message}".encode())
    os._exit(watchdog.EXIT_CODE)  # mpirun then ends the others
