"""Which device a rank computes on: one GPU each, or its share of the cores."""

import contextlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from keras_dist.comm.world import World

# "0" leaves it to the system on which cores a rank runs.
_BIND = "KERAS_DIST_BIND"

# A user who has set one of these has chosen the threads already.
_THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Device:
    """What a rank computes on: `kind` is "GPU" or "CPU".

    Args:
        kind: "GPU" or "CPU".
        index: Number of the GPU on its host; 0 for CPU.
        threads: Threads of one operation, 0 for TensorFlow's own choice.
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


def threads_of_rank(*, cores: int, local_size: int) -> int:
    """Threads of one rank when `local_size` ranks share `cores`; at least 1.

    >>> [threads_of_rank(cores=8, local_size=n) for n in (1, 2, 3, 16)]
    [8, 4, 2, 1]
    """
    return max(1, cores // local_size)


def choose_device(world: World, *, is_binding: bool = False) -> Device:
    """Take this rank's GPU or its share of the cores, before TensorFlow starts.

    TensorFlow fixes devices and threads when it first computes (a model with an
    `Input` is enough). Called too late, this warns, says what to do, and leaves
    things as they are.

    Args:
        world: The place of this process.
        is_binding: Whether a rank that computes on the CPU keeps to cores of its own,
            unless KERAS_DIST_BIND=0 is in the environment.

    Returns:
        The device as it is in use afterwards.
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
    return Device("CPU", 0, _divide_threads(world, is_binding=is_binding))


def cores_of_rank(
    cores: Sequence[int], *, local_rank: int, local_size: int
) -> set[int]:
    """Cores of one rank: as many for each, none for two; all where there are too few.

    >>> cores_of_rank([0, 1, 2, 5, 6], local_rank=1, local_size=2)
    {2, 5}
    >>> cores_of_rank([0, 1], local_rank=1, local_size=3)
    {0, 1}
    """
    each = len(cores) // local_size
    return set(sorted(cores)[local_rank * each :][:each] if each else cores)


def is_unbound() -> bool:
    """Whether this process may run on all cores of the machine."""
    return len(os.sched_getaffinity(0)) == os.cpu_count()


def _bind(cores: set[int]) -> None:
    """Keep all threads of this process on these cores, those to come too."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def _divide_threads(world: World, *, is_binding: bool) -> int:
    chosen = tf.config.threading.get_intra_op_parallelism_threads()
    if chosen or any(variable in os.environ for variable in _THREAD_VARIABLES):
        return int(chosen)
    cores = len(os.sched_getaffinity(0))
    threads = threads_of_rank(cores=cores, local_size=world.local_size)
    if world.local_size == 1:
        return threads
    if is_binding and os.environ.get(_BIND) != "0":
        local = {"local_rank": world.local_rank, "local_size": world.local_size}
        _bind(cores_of_rank(sorted(os.sched_getaffinity(0)), **local))
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        if not tf.config.threading.get_inter_op_parallelism_threads():
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        _warn_too_late(
            f"{world.local_size} ranks with {cores} threads each share {cores} cores"
        )
        return cores
    return threads


def _warn_too_late(what_happens: str) -> None:
    warnings.warn(
        "TensorFlow had already started when keras_dist was to choose the device of "
        f"this rank, so {what_happens}. Import keras_dist, or call "
        "keras_dist.init(), before the first model or tensor is made.",
        stacklevel=4,
    )
