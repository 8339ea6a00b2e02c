"""Horovod's Keras module on Keras 3: `import keras_dist.horovod as hvd`.

Names, arguments and meaning are Horovod's: each rank counts the same, and the script
scales its own rate and divides its own steps. `docs/how_to/migrate.md` lists what
differs.

- `basics`: `init`, and names that are Horovod's own: process sets, what it was built
  with, the timeline, `alltoall`, `join`
- `collectives`: Horovod's, of values, variables, objects, and of several at once
- `gradients`: how gradients are averaged; `DistributedGradientTape`
- `optimizer`: `DistributedOptimizer` and its mixin
- `callbacks`: Horovod's callbacks, those of the learning rate, too
- `loading`: `load_model`; what `compile` does more
- `sync_batch_norm`: `SyncBatchNormalization`
"""

from keras_dist import comm
from keras_dist.comm import local_rank, local_size, rank, size
from keras_dist.horovod import basics, callbacks
from keras_dist.horovod.basics import init
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
from keras_dist.horovod.gradients import DistributedGradientTape
from keras_dist.horovod.loading import install, load_model
from keras_dist.horovod.optimizer import DistributedOptimizer
from keras_dist.horovod.sync_batch_norm import SyncBatchNormalization

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

# `ProcessSet`, `nccl_built` and other names that are Horovod's own.
__getattr__ = basics.from_horovod

install()
