"""Who am I, choose the device, talk to the others."""

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
from keras_dist.comm.process_sets import init, within
from keras_dist.comm.runtime import (
    built_transports,
    device,
    has_mpi,
    local_rank,
    local_size,
    prepare,
    rank,
    size,
    transport_name,
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
    "gather",
    "gather_rows",
    "has_mpi",
    "init",
    "is_known",
    "local_rank",
    "local_size",
    "prepare",
    "rank",
    "gather_or_raise",
    "size",
    "stack",
    "sum",
    "sum_compressed",
    "sum_tensors",
    "timeline",
    "run_on_all",
    "total",
    "transport_name",
    "within",
]
