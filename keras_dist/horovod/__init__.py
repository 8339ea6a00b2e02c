"""Horovod's Keras module on Keras 3: `import keras_dist.horovod as hvd`.

Names, arguments and meaning are Horovod's: each rank counts the same, and the script
scales its own rate and divides its own steps. `docs/migrate/from_horovod.md` lists what
differs.

- `basics`: `init`, `rank`, `size`, what Horovod was built with, the timeline, `run`
- `process_sets`: groups of ranks
- `ops`: `Average`, `Sum`, …, and `Compression`
- `collectives`: `allreduce`, `allgather`, `broadcast`, of values, variables, objects,
  and of several at once
- `gradients`: how gradients are averaged; `DistributedGradientTape`
- `optimizer`: `DistributedOptimizer`, `PartialDistributedOptimizer`, and their mixin
- `callbacks`: Horovod's callbacks, those of the learning rate, too
- `metrics`: metrics that are no means, over the rows of all ranks
- `loading`: `load_model`, also of what Keras 2 has written; what `compile` does more
- `sync_batch_norm`: `SyncBatchNormalization`
- `elastic`: `run`, `KerasState`, callbacks that commit, and commits that are left when
  ranks are started again
"""

from keras_dist.horovod import callbacks, elastic
from keras_dist.horovod.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    run,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from keras_dist.horovod.collectives import (
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from keras_dist.horovod.gradients import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from keras_dist.horovod.loading import install, load_model
from keras_dist.horovod.ops import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
)
from keras_dist.horovod.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from keras_dist.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from keras_dist.horovod.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

install()
