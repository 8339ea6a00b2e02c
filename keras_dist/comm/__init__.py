"""Collectives, ranks and devices: the only part that uses a transport's operations.

- `world`: rank, size, local rank and local size, as the launcher says them
- `devices`: choose the GPU of this rank, or its CPU threads and cores
- `runtime`: `init`; state of this process: its device, and its link to the other ranks
- `rendezvous`: the ranks meet at the address of the first one
- `transport`: what both transports do, and what stands above them: records and errors
- `horovod_transport`: the only file that imports Horovod, and calls its collectives;
  settings for it on a rank without a GPU and for Open MPI, and a limit for its start
- `tensorflow_transport`: TensorFlow's own collectives, which need nothing else
- `collectives`: average, sum, broadcast and gather of any value; of tensors in graphs,
  too, also in float16 or bfloat16; raise an error of one rank on all ranks
- `agreement`: wait for all ranks; compare values between ranks; a block that the first
  rank runs before the others
"""

from keras_dist.comm.agreement import (
    agree,
    agree_on_variables,
    check_equal,
    first_rank,
    wait_for_all_ranks,
)
from keras_dist.comm.collectives import (
    average,
    broadcast,
    broadcast_variables,
    gather,
    gather_in_thread,
    gather_rows,
    name_of,
    raise_on_all,
    sendable,
    sum,
    sum_compressed,
    sum_tensors,
    to_array,
    total,
)
from keras_dist.comm.runtime import (
    device,
    init,
    is_rank_child,
    is_started,
    job_world,
    local_rank,
    local_size,
    prepare,
    rank,
    size,
    stop,
    transport_name,
    without_collectives,
)
from keras_dist.comm.world import World
