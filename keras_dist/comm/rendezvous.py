"""The meeting of ranks whose launcher has no rendezvous: rank 0 serves Horovod's.

`srun`, `torchrun` and Ray Train tell a process its rank, and where rank 0 is. Rank 0
serves a store there; every rank writes to it where it runs, and rank 0 answers with the
numbers of all. Then Horovod finds the ranks by the same store.
"""

import atexit
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.clusters import Place
from keras_dist.clusters.slurm import Slurm
from keras_dist.launch import monitor
from keras_dist.launch.failures import LOST_SECONDS
from keras_dist.launch.hosts import ranges
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
from keras_dist.version import __version__

# Seconds in which all ranks have to come, and between two looks.
_TIMEOUT, _TICK = 120.0, 0.1

# Seconds for which rank 0 stays, so that others read why they do not meet.
_READ_SECONDS = 2.0

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
    # Names of SLURM's nodes may be known to it alone.
    is_node = place.launcher == Slurm.name
    address = resolve_node(place.address) if is_node else place.address
    secret = os.environ.get(SECRET) or derived(job, "without a secret")
    if place.rank == 0:
        is_alone = place.local_size == place.size
        try:
            store = serve_at(address, place.port, secret, is_alone=is_alone)
        except OSError as error:
            raise RuntimeError(str(error)) from error
        _stores.append(store)
        atexit.register(monitor.stay_for_readers)  # runs after Horovod's
    client = StoreClient(address, place.port, secret)
    try:
        own, reached = client.wait(socket.gethostname(), timeout=_TIMEOUT) or ("", "")
    except ValueError as error:
        raise RuntimeError(
            f"Rank {place.rank} of {place.size}, started by {place.launcher}, does not "
            f"reach rank 0. {error}"
        ) from error
    here = [socket.gethostname(), place.local_rank, place.local_size, own]
    facts = {"here": here, "size": place.size, "version": __version__}
    client.put_surely(f"rank.{place.rank}", facts)
    if place.rank == 0:
        start = _gather_ranks(place, client)
        if "error" not in start:  # what is read below can be used at once
            _stores[0].open([make_slot(*numbers) for numbers in start["slots"]])
        client.put_surely("start", start)
    start = _wait_for_start(place, client)
    if "error" in start:
        if place.rank == 0:
            time.sleep(_READ_SECONDS)
        raise RuntimeError(start["error"])
    if is_loopback(own):  # rank 0 reaches itself so; others reach it by another
        others = [a for _, _, _, a in start["ranks"] if not is_loopback(a)]
        own = address_towards(others[0]) if others else own
    os.environ.update(
        {
            **connect_timeout(),
            **store_variables(reached, place.port, secret),
            **slot_variables(make_slot(*start["slots"][place.rank])),
            **interface(own),
            SECRET: derived(secret, f"ranks {start['nonce']}"),
        }
    )


def _gather_ranks(place: Place, client: StoreClient) -> dict[str, Any]:
    """Wait for all ranks, and return the numbers of all, or an error for all."""
    end = time.monotonic() + _TIMEOUT
    ranks: Mapping[str, Any] = {}
    while len(ranks) < place.size and time.monotonic() < end:
        time.sleep(_TICK)
        ranks = client.of_kind("rank")
    there = {int(rank): facts["here"] for rank, facts in ranks.items()}
    missing = set(range(place.size)) - set(there)
    if missing:
        hosts = Counter(host for host, *_ in there.values())
        came = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        return {
            "error": f"Not all ranks have come within {_TIMEOUT:g} s. Received: "
            f"{len(there)} of the {place.size} ranks of {place.launcher} ({came}); "
            f"missing: rank{'s' * (len(missing) > 1)} {ranges(missing)}. Their own "
            "output has the cause; every rank has to call keras_dist."
        }
    for rank, facts in ranks.items():
        if (facts["size"], facts["version"]) != (place.size, __version__):
            return {
                "error": "The ranks do not agree on their number and on the version "
                f"of keras_dist. Received: {facts['size']} and {facts['version']} on "
                f"rank {rank} on {facts['here'][0]}, {place.size} and {__version__} on "
                "rank 0."
            }
    ordered = [there[rank] for rank in range(place.size)]
    nonce = secrets.token_hex(16)
    return {"ranks": ordered, "slots": _number_slots(ordered), "nonce": nonce}


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


def _wait_for_start(place: Place, client: StoreClient) -> dict[str, Any]:
    """Return what rank 0 has answered."""
    begin = answered = time.monotonic()
    # Rank 0 gives up first, and says why.
    while answered - begin < _TIMEOUT + 15.0:
        values = client.get_all("start")
        if values:
            return dict(values["start"])
        if values is not None:
            answered = time.monotonic()
        elif time.monotonic() - answered > LOST_SECONDS:
            break
        time.sleep(_TICK)
    return {
        "error": f"Rank 0, started by {place.launcher}, has ended before the ranks "
        f"met. Received: rank {place.rank} of {place.size} on "
        f"{socket.gethostname()}, and no answer at {place.address}:{place.port}. "
        "Rank 0's own output has the cause."
    }
