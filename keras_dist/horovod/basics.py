"""Start and end of Horovod, ranks and sizes, and what Horovod was built with."""

from collections.abc import Iterable, Sequence
from typing import Any

from keras_dist import comm as collectives
from keras_dist.horovod.process_sets import ProcessSet, made


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Connect to the other ranks.

    Args:
        comm: Only `None`, for all ranks.
        process_sets: Groups of ranks to make, or `"dynamic"`: `add_process_set` can
            make them later.

    Raises:
        ValueError: If `comm` is given, or a group cannot be made.
    """
    ranks = list(comm) if isinstance(comm, Iterable) else comm
    if ranks is not None and ranks != list(range(collectives.size())):
        raise ValueError(
            "keras_dist.horovod connects all ranks that the launcher started. "
            f"Received: comm={comm!r}. Pass groups of ranks as `process_sets`."
        )
    if isinstance(process_sets, str) or not process_sets:
        if process_sets:
            collectives.start_with_process_sets()
        collectives.start(may_be_elastic=True)
        return
    groups = [process_set.members() for process_set in process_sets]
    collectives.init(process_sets=groups)
    made(process_sets)


def shutdown() -> None:
    """End the connection to the other ranks, at the end of the script."""
    collectives.stop()
    collectives.forget_process_sets()


def is_initialized() -> bool:
    """Whether `init` was called, or anything that calls it."""
    return collectives.is_started()


def rank() -> int:
    """Number of this process, from 0 to `size()` − 1."""
    return collectives.rank()


def size() -> int:
    """Number of ranks."""
    return collectives.size()


def local_rank() -> int:
    """Number of this process on its host."""
    return collectives.local_rank()


def local_size() -> int:
    """Number of ranks on this host."""
    return collectives.local_size()


def cross_rank() -> int:
    """Number of this host among those that have a rank of this local rank."""
    return int(collectives.fact("cross_rank", 0))


def cross_size() -> int:
    """Number of hosts that have a rank of this local rank."""
    return int(collectives.fact("cross_size", 1))


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    return bool(collectives.fact("is_homogeneous", True))


def mpi_threads_supported() -> bool:
    """Whether MPI can be called by several threads."""
    return mpi_enabled() and bool(collectives.fact("mpi_threads_supported", False))


def mpi_enabled() -> bool:
    """Whether the ranks communicate over MPI."""
    return bool(collectives.fact("mpi_enabled", False))


def gloo_enabled() -> bool:
    """Whether the ranks communicate over Gloo."""
    return bool(collectives.fact("gloo_enabled", False))


def mpi_built() -> bool:
    """Whether Horovod was built with MPI."""
    return bool(collectives.fact("mpi_built", False))


def gloo_built() -> bool:
    """Whether Horovod was built with Gloo."""
    return bool(collectives.fact("gloo_built", False))


def nccl_built() -> int:
    """The version of NCCL that Horovod was built with, 0 for none."""
    return int(collectives.fact("nccl_built", 0))


def ddl_built() -> bool:
    """Whether Horovod was built with IBM's DDL."""
    return bool(collectives.fact("ddl_built", False))


def ccl_built() -> bool:
    """Whether Horovod was built with Intel's oneCCL."""
    return bool(collectives.fact("ccl_built", False))


def cuda_built() -> bool:
    """Whether Horovod was built with CUDA."""
    return bool(collectives.fact("cuda_built", False))


def rocm_built() -> bool:
    """Whether Horovod was built with ROCm."""
    return bool(collectives.fact("rocm_built", False))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record Horovod's timeline, on all ranks; the first one writes the file.

    Args:
        file_path: The file.
        mark_cycles: Taken for scripts that pass it; cycles are not marked.

    Raises:
        ValueError: If Horovod was not started with `HOROVOD_TIMELINE=DYNAMIC`.
    """
    collectives.start_timeline(file_path)


def stop_timeline() -> None:
    """End the timeline."""
    collectives.stop_timeline()
