"""Rank and size of a process, as its launcher says them."""

import os
from dataclasses import dataclass, field

from keras_dist.clusters import Place, find_place
from keras_dist.launch.monitor.rank_process import JOB_IDS

# Number and count of the tasks that were started together, as variables of programs
# that do not say how these find each other: they would train side by side.
_STRANGERS = {
    "mpirun (MVAPICH2)": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
}

# Set by any program that starts tasks over PMIx, which does not say how many.
_PMIX_RANK = "PMIX_RANK"

# Set by `horovodrun --min-np --max-np --host-discovery-script`.
_ELASTIC = "HOROVOD_ELASTIC"

# Variables that launchers set to a different value in each job, or for each task.
_JOBS = (*JOB_IDS, "SLURM_STEP_ID", "SLURM_PROCID")


@dataclass(frozen=True)
class World:
    """Rank and size of this process; the defaults describe a single process.

    Args:
        rank: Number of this process, from 0 (the first rank) to size − 1.
        size: Number of ranks.
        local_rank: Number of this process on its host, from 0.
        local_size: Number of ranks on this host.
        num_hosts: Number of hosts; exact on the first rank only.

    Example:

    >>> world = World(rank=1, size=4)
    >>> world.is_first, world.size
    (False, 4)
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    num_hosts: int = field(default=1, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """True if this is the first rank, the one that prints and writes files."""
        return self.rank == 0


def world_at(place: Place | None) -> World:
    """Return rank and size of a place; one process alone for `None`."""
    if place is None:
        return World()
    return World(place.rank, place.size, place.local_rank, place.local_size)


def check_not_stranded() -> None:
    """Check that this process, which no launcher of ours started, is alone.

    Several tasks would otherwise be as many trainings of all rows, which write the same
    files.

    Raises:
        RuntimeError: If several tasks were started.
    """
    environ = os.environ
    found = [
        f"{launcher}, {task}={environ[task]}, {count}={environ[count]}"
        for launcher, (task, count) in _STRANGERS.items()
        if task in environ and environ.get(count, "1") not in ("0", "1")
    ]
    if environ.get(_PMIX_RANK, "0") != "0":
        found.append(f"PMIx, {_PMIX_RANK}={environ[_PMIX_RANK]}")
    if found:
        raise RuntimeError(
            "Several tasks were started, and no variable says how they meet: each "
            f"would train alone, and write the same files. Received: {found[0]}. Start "
            "the ranks with `keras-dist run`, `srun`, `torchrun`, `horovodrun` or Open "
            "MPI's `mpirun`. If they are to train side by side, remove these variables "
            "from their environment."
        )


def check_not_elastic() -> None:
    """Check that Horovod's elastic mode has not started this process.

    It changes the ranks inside of living processes, and never again uses the host of
    one that has ended: neither fits a training that keeps its ranks.

    Raises:
        RuntimeError: If it has.
    """
    if os.environ.get(_ELASTIC, "0") not in ("", "0"):
        raise RuntimeError(
            "keras_dist does not train in Horovod's elastic mode, in which the ranks "
            "of a running process change: it would end at the first change. Received: "
            f"{_ELASTIC}={os.environ[_ELASTIC]}. Start the script with `keras-dist run "
            "-H a:2,b:2 --restarts 10`, and with `dist_fit(…, resume=folder)`, which "
            "goes on after the loss of a rank; or with `horovodrun -np`, "
            "without --min-np, --max-np and --host-discovery-script."
        )


def identity() -> str:
    """Return a text that differs between ranks and between jobs."""
    return ":".join([str(find_place()), *(os.environ.get(name, "") for name in _JOBS)])
