"""Who am I, choose the device, talk to the others."""

from keras_dist.comm.agreement import agree, together
from keras_dist.comm.collectives import (
    average,
    broadcast,
    broadcast_arrays,
    gather,
    stack,
    sum,
    sum_tensors,
    total,
)
from keras_dist.comm.devices import Device
from keras_dist.comm.runtime import (
    device,
    init,
    local_rank,
    local_size,
    prepare,
    rank,
    size,
    transport_name,
)
from keras_dist.comm.transport import explained
from keras_dist.comm.world import World

__all__ = [
    "Device",
    "World",
    "agree",
    "average",
    "broadcast",
    "broadcast_arrays",
    "device",
    "explained",
    "gather",
    "init",
    "local_rank",
    "local_size",
    "prepare",
    "rank",
    "size",
    "stack",
    "sum",
    "sum_tensors",
    "together",
    "total",
    "transport_name",
]
