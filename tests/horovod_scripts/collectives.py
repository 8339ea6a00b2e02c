"""Averages, sums, gathers and broadcasts of numbers, lists, arrays and objects."""

import numpy as np
from results import record

import keras_dist.horovod as hvd

hvd.init()
rank = hvd.rank()
array = np.arange(3, dtype="float32") + rank
gathered = hvd.allgather(np.full((rank + 1, 2), rank, "float32"), name="rows")
record(
    number=hvd.allreduce(rank + 0.5),
    numbers=hvd.allreduce([1.0 * rank, 2.0], name="pair"),
    added=hvd.allreduce(array, op=hvd.Sum),
    scaled=hvd.allreduce(array, prescale_factor=2.0, postscale_factor=0.5),
    gathered=gathered,
    sent=hvd.broadcast(array, root_rank=1, name="array"),
    largest=hvd.allreduce(np.float32(rank), op=hvd.Max),
    smallest=hvd.allreduce(np.float32(rank), op=hvd.Min),
    scattered=hvd.reducescatter(np.arange(4, dtype="float32") + rank),
    grouped=hvd.grouped_allreduce([array, 2 * array], op=hvd.Sum),
    sent_object=hvd.broadcast_object({"epoch": rank, "name": f"rank {rank}"}, 1),
    objects=hvd.allgather_object({"rank": rank}),
    facts=[hvd.size(), hvd.local_size(), hvd.cross_size(), hvd.is_initialized()],
)
