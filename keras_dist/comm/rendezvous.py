"""The meeting of ranks whose launcher has no rendezvous: rank 0 serves Horovod's.

`srun`, `torchrun` and Ray Train tell a process its rank, and where rank 0 is. Rank 0
serves a store there, and from what every rank says of its host it makes the numbers of
all. Then Horovod finds the ranks by the same store.
"""

import atexit
import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

from keras_dist.clusters import Place
from keras_dist.clusters.slurm import Slurm
from keras_dist.launch import monitor
from keras_dist.launch.meeting import Meeting
from keras_dist.launch.network import (
    address_towards,
    interface,
    is_loopback,
    resolve_node,
)
from keras_dist.launch.ranks import connect_timeout
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.signing import derived
from keras_dist.launch.store import (
    Store,
    StoreClient,
    make_slot,
    serve_at,
    slot_variables,
    store_variables,
)

# Seconds in which all ranks have to come.
_TIMEOUT = 120.0

# The store of the job, if this is rank 0: its thread ends with the process.
_stores: list[Store] = []


def meet(place: Place) -> None:
    """Set the variables by which Horovod finds the other ranks of a job.

    Every rank calls it. The job's secret is `KERAS_DIST_SECRET`; without it the store
    answers whoever knows the launcher's variables, as that of `horovodrun` does.

    Args:
        place: Where this rank stands, and where the ranks meet.

    Raises:
        RuntimeError: If ranks are missing after 120 s, if their numbers contradict each
            other, or if the port is in use.
    """
    # By the launcher's name of the host: some ranks may know an address of it alone.
    job = f"{place.launcher} {place.address}:{place.port}"
    secret = os.environ.get(SECRET) or derived(job, "without a secret")
    try:
        variables = _meet(place, secret)
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"Rank {place.rank} of {place.size}, started by {place.launcher}, does not "
            f"meet the others. {error}"
        ) from error
    os.environ.update({**connect_timeout(), **variables})


def _meet(place: Place, secret: str) -> dict[str, str]:
    # Names of SLURM's nodes may be known to it alone.
    is_node = place.launcher == Slurm.name
    address = resolve_node(place.address) if is_node else place.address
    if place.rank == 0:
        is_alone = place.local_size == place.size
        _stores.append(serve_at(address, place.port, secret, is_alone=is_alone))
        atexit.register(monitor.stay_for_readers)  # runs after Horovod's
    client = StoreClient(address, place.port, secret)
    ends = client.wait(socket.gethostname(), timeout=_TIMEOUT)
    assert ends is not None  # no signal ends this wait
    own, reached = ends

    def number(ranks: Sequence[Any]) -> dict[str, Any]:
        slots = _number_slots(ranks)
        _stores[0].open([make_slot(*numbers) for numbers in slots])
        return {"slots": slots, "addresses": [address for *_, address in ranks]}

    here = [socket.gethostname(), place.local_rank, place.local_size, own]
    advice = "Their own output has the cause; every rank has to call keras_dist."
    with Meeting(client, place.rank, place.size, kind="rank") as ranks:
        start = ranks.join(here, number, timeout=_TIMEOUT, advice=advice)
    if is_loopback(own):  # rank 0 reaches itself so; others reach it by another
        others = [each for each in start["addresses"] if not is_loopback(each)]
        own = address_towards(others[0]) if others else own
    return {
        **store_variables(reached, place.port, secret),
        **slot_variables(make_slot(*start["slots"][place.rank])),
        **interface(own),
        SECRET: derived(secret, f"ranks {ranks.nonce}"),
    }


def _number_slots(ranks: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the fields of the slot of each rank, whose order is the launcher's.

    >>> _number_slots([["a", 0, 2, ""], ["b", 0, 1, ""], ["a", 1, 2, ""]])[1]
    ['b', 1, 0, 1, 3, 1, 2]
    """
    cross_sizes = Counter(local_rank for _, local_rank, _, _ in ranks)
    before: Counter[int] = Counter()
    first_ranks: Counter[str] = Counter()
    slots: list[list[Any]] = []
    for host, local_rank, local_size, _ in ranks:
        # One host may have the ranks of two launchers, each with a local rank 0.
        first_ranks[host] += local_rank == 0
        name = host if first_ranks[host] <= 1 else f"{host}-{first_ranks[host]}"
        cross = before[local_rank], cross_sizes[local_rank]
        own = len(slots), local_rank, cross[0], len(ranks), local_size, cross[1]
        slots.append([name, *own])
        before[local_rank] += 1
    return slots
