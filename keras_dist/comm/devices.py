"""Choose the device of a rank: a GPU, or its share of the CPU cores."""

import contextlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from keras_dist.comm.world import World

# "0": do not bind ranks to cores of their own.
_BIND = "KERAS_DIST_BIND"

# If the user has set one of these, the number of threads is not changed.
_THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Device:
    """The device that a rank computes on.

    Args:
        kind: "GPU" or "CPU".
        index: Index of the GPU on its host; 0 for a CPU.
        threads: Number of intra-op threads; 0 for TensorFlow's own choice.
    """

    kind: str = "CPU"
    index: int = 0
    threads: int = 0

    def __str__(self) -> str:
        if self.kind == "GPU":
            return f"GPU {self.index}"
        if not self.threads:
            return "CPU"
        return f"CPU, {self.threads} thread{'s' if self.threads > 1 else ''} each"


def choose_device(world: World, *, is_binding: bool = False) -> Device:
    """Select the GPU of this rank, or set its number of CPU threads.

    Must be called before TensorFlow initializes its devices and threads, which it does
    at the first computation; making a model with an `Input` is one. If it is called
    later, this warns and changes nothing.

    Args:
        world: Ranks of this process.
        is_binding: Whether to bind a rank without a GPU to cores of its own, also if it
            cannot run on all of the host. The variable KERAS_DIST_BIND=0 turns this
            off.

    Returns:
        The device that is in use after the call.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        index = world.local_rank % len(gpus)
        try:
            tf.config.set_visible_devices(gpus[index], "GPU")
            tf.config.experimental.set_memory_growth(gpus[index], True)
        except RuntimeError:
            if tf.config.get_visible_devices("GPU") != [gpus[index]]:
                _warn_too_late(f"every rank of this host uses {len(gpus)} GPUs")
        return Device("GPU", index)
    return Device("CPU", 0, _set_threads(world, is_binding=is_binding))


def rank_cores(cores: Sequence[int], *, local_rank: int, local_size: int) -> set[int]:
    """Cores of one rank: the same number for each rank, and no core for two ranks.

    If there are fewer cores than ranks, each rank gets all of them.

    >>> rank_cores([0, 1, 2, 5, 6], local_rank=1, local_size=2)
    {2, 5}
    >>> rank_cores([0, 1], local_rank=1, local_size=3)
    {0, 1}
    """
    each = len(cores) // local_size
    return set(sorted(cores)[local_rank * each :][:each] if each else cores)


def has_own_cores(count: int, *, local_size: int, num_cores: int) -> bool:
    """Return True if a launcher has bound each rank to cores of its own.

    `srun` with task/affinity does, and `mpirun --bind-to core`. A mask that all ranks
    share has all cores of the host or container, or too many for each rank to have as
    many.

    Args:
        count: Cores of this rank.
        local_size: Ranks on this host.
        num_cores: Cores of the host, or of the container.

    >>> has_own_cores(2, local_size=4, num_cores=8)
    True
    >>> has_own_cores(8, local_size=4, num_cores=8)
    False
    """
    return count * local_size <= num_cores and count < num_cores


def _count_cores() -> int:
    """Count the cores of the control group of this process, or of the host."""
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().rpartition(":")[2].strip()
        path = Path(f"/sys/fs/cgroup{group}/cpuset.cpus.effective")
        ranges = (part.split("-") for part in path.read_text().strip().split(","))
        return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)
    return os.cpu_count() or 1


def _set_threads(world: World, *, is_binding: bool) -> int:
    """Set TensorFlow's threads to this rank's share of the cores; return how many."""
    chosen = tf.config.threading.get_intra_op_parallelism_threads()
    if chosen or any(variable in os.environ for variable in _THREAD_VARIABLES):
        return int(chosen)
    cores = sorted(os.sched_getaffinity(0))
    has_own = not is_binding and has_own_cores(
        len(cores), local_size=world.local_size, num_cores=_count_cores()
    )
    if world.local_size == 1 or has_own:
        return len(cores)
    threads = max(1, len(cores) // world.local_size)
    # mpirun binds ranks to cores itself, except under horovodrun, which turns it off.
    is_binding |= len(cores) == os.cpu_count()
    if is_binding and os.environ.get(_BIND) != "0":
        local = {"local_rank": world.local_rank, "local_size": world.local_size}
        for thread in os.listdir("/proc/self/task"):  # new threads inherit it
            with contextlib.suppress(OSError):  # the thread may have ended by now
                os.sched_setaffinity(int(thread), rank_cores(cores, **local))
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        if not tf.config.threading.get_inter_op_parallelism_threads():
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        _warn_too_late(
            f"{world.local_size} ranks with {len(cores)} threads each share "
            f"{len(cores)} cores"
        )
        return len(cores)
    return threads


def _warn_too_late(consequence: str) -> None:
    warnings.warn(
        "TensorFlow had already started when keras_dist was to choose the device of "
        f"this rank, so {consequence}. Import keras_dist, or call "
        "keras_dist.init(), before the first model or tensor is made.",
        stacklevel=4,
    )
