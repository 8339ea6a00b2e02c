"""Collectives, ranks and devices: the only part of the package that uses Horovod.

- `world`: rank, size, local rank and local size, read from the launcher's variables
- `srun`: how tasks of SLURM meet that no launcher of ours has started
- `devices`: choose the GPU of this rank, or its CPU threads and cores
- `runtime`: state of this process: its device, and its link to the other ranks
- `transport`: the only file that imports Horovod; one thin function per collective
- `open_mpi`: settings of Open MPI, and a limit for its start
- `process_sets`: `init`, and collectives among some of the ranks only
- `collectives`: average, sum, broadcast and gather of any value, outside of a graph
- `tensors`: collectives of tensors that also work inside a `tf.function`
- `compressed`: allreduce in float16 or bfloat16
- `agreement`: raise an error of one rank on all ranks; compare values between ranks
- `first_rank`: a block that the first rank runs before the others
- `signed`: sign pickled messages, so that only those of this job are unpickled
- `timeline`: record Horovod's timeline during a block
"""

from keras_dist.comm.agreement import agree, gather_or_raise, is_known, run_on_all
from keras_dist.comm.collectives import (
    average,
    broadcast,
    broadcast_arrays,
    broadcast_variables,
    gather,
    sum,
)
from keras_dist.comm.compressed import sum_compressed
from keras_dist.comm.devices import Device
from keras_dist.comm.first_rank import first_rank
from keras_dist.comm.process_sets import init, within
from keras_dist.comm.runtime import (
    built_transports,
    device,
    has_mpi,
    is_child_of_rank,
    local_rank,
    local_size,
    nccl_version,
    prepare,
    rank,
    size,
    transport_name,
    world_of_job,
)
from keras_dist.comm.tensors import adaptive_sum, gather_rows, stack, sum_tensors, total
from keras_dist.comm.timeline import announce_timeline, timeline
from keras_dist.comm.transport import explained
from keras_dist.comm.world import World

__all__ = [
    "Device",
    "World",
    "adaptive_sum",
    "agree",
    "announce_timeline",
    "average",
    "broadcast",
    "broadcast_arrays",
    "broadcast_variables",
    "built_transports",
    "device",
    "explained",
    "first_rank",
    "gather",
    "gather_or_raise",
    "gather_rows",
    "has_mpi",
    "init",
    "is_child_of_rank",
    "is_known",
    "local_rank",
    "local_size",
    "nccl_version",
    "prepare",
    "rank",
    "run_on_all",
    "size",
    "stack",
    "sum",
    "sum_compressed",
    "sum_tensors",
    "timeline",
    "total",
    "transport_name",
    "within",
    "world_of_job",
]
