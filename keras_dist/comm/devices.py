"""Choose the device of a rank: a GPU, or its share of the CPU cores."""

import contextlib
import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from keras_dist.comm.world import World
from keras_dist.launch.monitor.rank_process import THREADS

# "0": do not bind ranks to cores of their own.
_BIND = "KERAS_DIST_BIND"

# Where the kernel says which CPUs are threads of one core, and in which NUMA node.
_CPUS = Path("/sys/devices/system/cpu")

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


def share_cpus(
    cpus: Collection[int],
    *,
    local_rank: int,
    local_size: int,
    num_cpus: int,
    folder: Path = _CPUS,
) -> tuple[set[int], int]:
    """Return the CPUs of a rank, and its number of threads.

    Each rank gets the same number of whole cores, with all of their threads, in one
    NUMA node where they fit. If there are fewer cores than ranks, they share all cores.
    The number of threads is the same for all ranks, since results may depend on it.

    A rank keeps all of `cpus` if a launcher has bound each rank to some of its own, as
    `srun` with task/affinity and `mpirun --bind-to core` do: a mask that ranks share
    has all CPUs of the host or container, or too many for each rank to have as many.

    Args:
        cpus: CPUs on which this rank may run; a core has one for each thread.
        local_rank: Number of this rank on its host.
        local_size: Number of ranks on this host.
        num_cpus: CPUs that the ranks of this host have together.
        folder: A folder `cpuN` for each CPU, as the kernel describes it.
    """
    has_own = len(cpus) * local_size <= num_cpus and len(cpus) < num_cpus
    if local_size == 1 or has_own:
        return set(cpus), len(cpus)
    by_node: dict[str, dict[str, set[int]]] = {}
    for cpu in sorted(cpus):
        node = next((path.name for path in folder.glob(f"cpu{cpu}/node*")), "")
        siblings = folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        core = siblings.read_text() if siblings.exists() else str(cpu)
        by_node.setdefault(node, {}).setdefault(core, set()).add(cpu)
    each = sum(map(len, by_node.values())) // local_size
    if not each:
        return set(cpus), max(1, len(cpus) // local_size)
    inside, rest = list[set[int]](), list[set[int]]()
    for node_cores in by_node.values():
        cores = list(node_cores.values())
        end = len(cores) - len(cores) % each
        inside, rest = inside + cores[:end], rest + cores[end:]
    cores, begins = inside + rest, range(0, local_size * each, each)
    shares = [set[int]().union(*cores[begin : begin + each]) for begin in begins]
    return shares[local_rank], min(map(len, shares))


def _count_cpus() -> int:
    """Count the CPUs of the control group of this process, or of the host."""
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
    cpus = os.sched_getaffinity(0)
    own, threads = share_cpus(
        cpus,
        local_rank=world.local_rank,
        local_size=world.local_size,
        num_cpus=len(cpus) if is_binding else _count_cpus(),
    )
    threads = min(threads, int(os.environ.get(THREADS, threads)))
    if threads == len(cpus):
        return threads
    # mpirun binds ranks to cores itself, except under horovodrun, which turns it off.
    is_binding |= len(cpus) == os.cpu_count()
    if is_binding and os.environ.get(_BIND) != "0":
        for thread in os.listdir("/proc/self/task"):  # new threads inherit it
            with contextlib.suppress(OSError):  # the thread may have ended by now
                os.sched_setaffinity(int(thread), own)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        if not tf.config.threading.get_inter_op_parallelism_threads():
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        _warn_too_late(
            f"{world.local_size} ranks with {len(cpus)} threads each share "
            f"{len(cpus)} cores"
        )
        return len(cpus)
    return threads


def _warn_too_late(consequence: str) -> None:
    warnings.warn(
        "TensorFlow had already started when keras_dist was to choose the device of "
        f"this rank, so {consequence}. Import keras_dist, or call "
        "keras_dist.init(), before the first model or tensor is made.",
        stacklevel=4,
    )
