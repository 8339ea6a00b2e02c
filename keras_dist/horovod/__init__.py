"""Horovod's Keras module on Keras 3: `import keras_dist.horovod as hvd`.

Names, arguments and meaning are Horovod's: each rank counts the same, and the script
scales its own rate and divides its own steps. `docs/how_to/migrate.md` lists what
differs.

- `collectives`: Horovod's, of values, variables, objects, and of several at once
- `optimizer`: `DistributedOptimizer`, `DistributedGradientTape`,
  `SyncBatchNormalization`, `load_model`; what `compile` does more
- `callbacks`: Horovod's callbacks, with the ones for learning rates

Process sets, what Horovod was built with, the timeline, `alltoall` and `join` are
Horovod's own.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from keras_dist import comm
from keras_dist.comm import horovod_transport, local_rank, local_size, rank, size
from keras_dist.comm.runtime import connected_link
from keras_dist.horovod import callbacks
from keras_dist.horovod.collectives import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    broadcast_object,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from keras_dist.horovod.optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    SyncBatchNormalization,
    install,
    load_model,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
]

is_initialized, shutdown = comm.is_started, comm.stop

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


def __getattr__(name: str) -> Any:
    """Return what `horovod.tensorflow` has by one of these names.

    Raises:
        AttributeError: If it is not one of `FROM_HOROVOD`.
        RuntimeError: If Horovod cannot be imported, or does not connect the ranks.
    """
    if name not in FROM_HOROVOD:
        raise AttributeError(f"module 'keras_dist.horovod' has no attribute {name!r}")
    link = connected_link()
    is_fact = name.endswith(("_built", "_enabled", "_supported"))
    if not (link is None or link.is_horovod or is_fact):
        raise RuntimeError(
            f"`{name}` is Horovod's own. Received: a job whose ranks are connected by "
            f"{link.describe()}. Run `keras-dist install-horovod`, and set no "
            "KERAS_DIST_TRANSPORT."
        )
    return getattr(horovod_transport.library(), name)


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
        # With it Horovod lets process sets be added after its start.
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    rank()
    ranks = list(comm) if isinstance(comm, Iterable) else comm
    if ranks is not None and ranks != list(range(size())):
        raise ValueError(
            "keras_dist.horovod connects all ranks that the launcher started. "
            f"Received: comm={comm!r}. Pass groups of ranks as `process_sets`."
        )
    if size() > 1 and process_sets and not isinstance(process_sets, str):
        for process_set in process_sets:
            horovod_transport.library().add_process_set(process_set)


install()
