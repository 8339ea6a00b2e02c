"""Who am I, and the groups of ranks that train apart."""

import atexit
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from keras_dist import monitor
from keras_dist.comm import runtime, transport
from keras_dist.comm.agreement import agree
from keras_dist.comm.collectives import gather
from keras_dist.comm.world import World, launched

_sets: dict[tuple[int, ...], transport.Link] = {}


def init(
    *,
    process_sets: Sequence[Sequence[int]] = (),
    stall_limit: float | None = None,
) -> World:
    """Connect with the other ranks and return the place of this process.

    The first call starts Horovod when a launcher (`horovodrun`, `mpirun`) started
    this process, and chooses the device: one GPU per local rank with memory growth,
    or this rank's share of the cores. Later calls return the same value. Without a
    launcher this is the serial run: rank 0 of 1, no Horovod needed.

    Args:
        process_sets: Groups of ranks that are going to train apart, each as a list of
            ranks; the same on every rank, and in the first call only. A fit takes one
            of them by `dist_fit(…, process_set=[…])`.
        stall_limit: Seconds after which a job ends in which no rank makes progress, 0
            for never; in the first call only. By default `KERAS_DIST_STALL_SECONDS`
            of the environment, else 120.

    Returns:
        A `World(rank, size, local_rank, local_size)`.

    Raises:
        RuntimeError: If a launcher started this process and Horovod is unusable, or if
            `process_sets` come after the first call.
        ValueError: If a process set names a rank that there is not, or a rank twice,
            or if the ranks were given different sets, or `stall_limit` is no number of
            seconds.

    >>> init()
    World(rank=0, size=1, local_rank=0, local_size=1)
    """
    monitor.set_limit(stall_limit)
    sets = list(dict.fromkeys(tuple(sorted(ranks)) for ranks in process_sets))
    found = launched()
    _check(sets, found[1].size if found else 1)
    if not sets or found is None or set(sets) <= set(_sets):
        return runtime.start()
    if runtime.is_started():
        raise RuntimeError(
            "Process sets are made when Horovod starts, by the first call of "
            f"keras_dist.init. Received: process_sets={process_sets} in a later call. "
            "Call it before any other function of keras_dist."
        )
    world = runtime.start(is_divided=True)
    agree({"`process_sets`": sets}, advice="Give the same sets to every rank.")
    link, _ = runtime.connection()
    if link is not None:
        _sets.update({ranks: transport.divide(link, ranks) for ranks in sets})
        atexit.register(_wait_for_all)  # comes before Horovod's own shutdown
    return world


def _wait_for_all() -> None:
    """The first rank to end would end Horovod for the sets that still train."""
    # After an error the others in its set wait for this rank: then Horovod has to end.
    if getattr(sys, "last_value", None) is None:
        gather("the end")


@contextlib.contextmanager
def within(ranks: Sequence[int] | None) -> Iterator[None]:
    """Inside the block, these ranks are all that there are; `None` changes nothing.

    Raises:
        ValueError: If it is no process set of `init`, or this rank is not in it.
    """
    world = runtime.start()
    if ranks is None or world.size == 1 or runtime.is_within():
        yield
        return
    chosen = tuple(sorted(ranks))
    if chosen not in _sets or world.rank not in chosen:
        raise ValueError(
            "`process_set` must be one of those given to keras_dist.init, and this "
            f"rank must be in it. Received: process_set={list(ranks)} on rank "
            f"{world.rank}; there are {[list(known) for known in _sets]}."
        )
    world_of_set = replace(world, rank=chosen.index(world.rank), size=len(chosen))
    with runtime.only(_sets[chosen], world_of_set):
        yield


def _check(sets: list[tuple[int, ...]], size: int) -> None:
    for ranks in sets:
        in_range = all(isinstance(rank, int) and 0 <= rank < size for rank in ranks)
        if not ranks or not in_range or len(set(ranks)) < len(ranks):
            raise ValueError(
                f"A process set is a list of ranks from 0 to {size - 1}, each once. "
                f"Received: {list(ranks)}"
            )
