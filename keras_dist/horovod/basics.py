"""The start of Horovod, and names that are its own."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from keras_dist.comm import size, start, transport

# Names of `horovod.tensorflow` that this module has as they are there. They are looked
# up when they are used, since on one process Horovod need not be installed.
FROM_HOROVOD = frozenset(
    {
        *("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"),
        *("ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled"),
        *("mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built"),
        *("alltoall", "broadcast_global_variables", "join"),
        *("cross_rank", "cross_size", "is_homogeneous"),
        *("rocm_built", "start_timeline", "stop_timeline"),
    }
)

# With this variable Horovod lets process sets be added after its start.
_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def from_horovod(name: str) -> Any:
    """Return what `horovod.tensorflow` has by one of these names.

    Raises:
        AttributeError: If it is not one of `FROM_HOROVOD`.
        RuntimeError: If Horovod cannot be imported.
    """
    if name not in FROM_HOROVOD:
        raise AttributeError(f"module 'keras_dist.horovod' has no attribute {name!r}")
    return getattr(transport.library(), name)


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """Connect to the other ranks.

    Args:
        comm: Only `None`, for all ranks.
        process_sets: Objects of `ProcessSet` to register, or `"dynamic"`:
            `add_process_set` registers them later.

    Raises:
        ValueError: If `comm` is given, or a process set cannot be registered.
    """
    if process_sets:
        os.environ[_DYNAMIC] = "1"
    start()
    ranks = list(comm) if isinstance(comm, Iterable) else comm
    if ranks is not None and ranks != list(range(size())):
        raise ValueError(
            "keras_dist.horovod connects all ranks that the launcher started. "
            f"Received: comm={comm!r}. Pass groups of ranks as `process_sets`."
        )
    if size() > 1 and process_sets and not isinstance(process_sets, str):
        for process_set in process_sets:
            from_horovod("add_process_set")(process_set)
