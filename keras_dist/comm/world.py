"""Who am I: the answer of `init()`, and what a launcher says in the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

# How each launcher tells a process its place: rank, size, local rank, local size.
_LAUNCHERS = {
    "horovodrun": (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    ),
    "mpirun (Open MPI)": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpirun (MPICH)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}

# What differs from job to job where the numbers of the ranks are the same.
_JOBS = ("HOROVOD_GLOO_RENDEZVOUS_PORT", "PMIX_NAMESPACE", "PMI_JOBID")


@dataclass(frozen=True)
class World:
    """The place of this process among all; with its defaults, the serial run.

    Args:
        rank: Number of this process, from 0 (the first rank) to size − 1.
        size: How many processes train together.
        local_rank: Number of this process on its host, from 0.
        local_size: How many of the processes run on this host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, the one that prints and writes."""
        return self.rank == 0


def launched(environ: Mapping[str, str] | None = None) -> tuple[str, World] | None:
    """The launcher that started this process and the place it gave, or `None`.

    >>> launched({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"})
    ('horovodrun', World(rank=1, size=2, local_rank=0, local_size=1))
    >>> launched({}) is None
    True
    """
    environ = os.environ if environ is None else environ
    for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
        if rank in environ and size in environ:
            return launcher, World(
                rank=int(environ[rank]),
                size=int(environ[size]),
                local_rank=int(environ.get(local_rank, 0)),
                local_size=int(environ.get(local_size, 1)),
            )
    return None


def identity() -> str:
    """What the environment says of this rank and its job, in a word."""
    names = [ranks[0] for ranks in _LAUNCHERS.values()]
    return ":".join(os.environ.get(name, "") for name in (*names, *_JOBS))
