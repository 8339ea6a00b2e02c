"""`init`, and process sets: groups of ranks that train separately."""

import atexit
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from keras_dist.comm import runtime, transport
from keras_dist.comm.agreement import agree
from keras_dist.comm.collectives import gather
from keras_dist.comm.world import World, launched
from keras_dist.launch import monitor

# The link of each process set, by its sorted ranks.
_sets: dict[tuple[int, ...], transport.Link] = {}


def init(
    *,
    process_sets: Sequence[Sequence[int]] = (),
    stall_limit: float | None = None,
) -> World:
    """Connect to the other ranks, and return the rank and size of this process.

    If a launcher (`keras-dist run`, `horovodrun`, `mpirun`) started this process, the
    first call starts Horovod and chooses the device: one GPU per local rank with memory
    growth, or this rank's share of the CPU cores. Later calls return the same value.
    Without a launcher this process is rank 0 of 1, and Horovod is not needed.

    Args:
        process_sets: Groups of ranks that are going to train separately, each a list
            of ranks. Pass the same groups on every rank, in the first call only. A fit
            selects one of them with `dist_fit(…, process_set=[…])`.
        stall_limit: The job ends if no rank makes progress for this many seconds; 0
            turns this off. In the first call only. By default the value of the
            environment variable `KERAS_DIST_STALL_SECONDS`, else 120.

    Returns:
        A `World(rank, size, local_rank, local_size)`.

    Raises:
        RuntimeError: If a launcher started this process but Horovod cannot be used, or
            if new `process_sets` are passed after the first call.
        ValueError: If a process set names a rank that does not exist, or a rank twice;
            if `process_sets` differ between the ranks; or if `stall_limit` is not a
            number of seconds.

    Example:

    >>> init()
    World(rank=0, size=1, local_rank=0, local_size=1)
    """
    monitor.set_limit(stall_limit)
    sets = list(dict.fromkeys(tuple(sorted(ranks)) for ranks in process_sets))
    from_launcher = launched()
    _check(sets, from_launcher[1].size if from_launcher else 1)
    if not sets or from_launcher is None or set(sets) <= set(_sets):
        return runtime.start()
    if runtime.is_started():
        raise RuntimeError(
            "Process sets are made when Horovod starts, by the first call of "
            f"keras_dist.init. Received: process_sets={process_sets} in a later call. "
            "Call it before any other function of keras_dist."
        )
    world = runtime.start(has_process_sets=True)
    agree({"`process_sets`": sets}, advice="Give the same sets to every rank.")
    link, _ = runtime.connection()
    if link is not None:
        _sets.update({ranks: transport.add_process_set(link, ranks) for ranks in sets})
        atexit.register(_wait_for_all)  # runs before Horovod's own shutdown
    return world


def _wait_for_all() -> None:
    """Wait at exit for all ranks, because the first exit shuts Horovod down for all.

    Without it, a process set that has finished would end the sets that still train.
    """
    # After an error, other ranks of the set may wait in a collective for this rank.
    # Only a shutdown of Horovod ends that, so this rank must not wait for them.
    has_failed = getattr(sys, "last_value", None) is not None
    if runtime.is_started() and not (has_failed or runtime.is_child_of_rank()):
        gather("the end")


@contextlib.contextmanager
def within(ranks: Sequence[int] | None) -> Iterator[None]:
    """Inside the block, collectives are among these ranks only.

    `rank()` and `size()` then count within the process set. Nothing changes without a
    launcher, or inside another block.

    Args:
        ranks: The process set; `None` for all ranks.

    Raises:
        ValueError: If `ranks` was not passed to `init`, or does not have this rank.
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
    world_of_set = replace(
        world,
        rank=chosen.index(world.rank),
        size=len(chosen),
        num_hosts=min(world.num_hosts, -(-len(chosen) // world.local_size)),
    )
    with runtime.restricted_to(_sets[chosen], world_of_set):
        yield


def _check(sets: list[tuple[int, ...]], size: int) -> None:
    for ranks in sets:
        in_range = all(isinstance(rank, int) and 0 <= rank < size for rank in ranks)
        if not ranks or not in_range or len(set(ranks)) < len(ranks):
            raise ValueError(
                f"A process set is a list of ranks from 0 to {size - 1}, each once. "
                f"Received: {list(ranks)}"
            )
