"""Rank and size of a process, and how launchers pass them in the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

# Variables that each launcher sets: rank, size, local rank, local size.
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

# Variables that launchers set to a different value in each job.
_JOBS = ("HOROVOD_GLOO_RENDEZVOUS_PORT", "PMIX_NAMESPACE", "PMI_JOBID")


@dataclass(frozen=True)
class World:
    """Rank and size of this process; the defaults are those of one process alone.

    Args:
        rank: Number of this process, from 0 (the first rank) to size − 1.
        size: Number of ranks.
        local_rank: Number of this process on its host, from 0.
        local_size: Number of ranks on this host.
        num_hosts: Number of hosts; exact on the first rank, which prints it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    num_hosts: int = field(default=1, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, the one that prints and writes files."""
        return self.rank == 0


def launched(environ: Mapping[str, str] | None = None) -> tuple[str, World] | None:
    """Name of the launcher that started this process, and the ranks that it set.

    Args:
        environ: Environment variables; by default those of this process.

    Returns:
        `None` if no launcher started this process.

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
    """A string that differs between ranks and between jobs, from the environment."""
    names = [ranks[0] for ranks in _LAUNCHERS.values()]
    return ":".join(os.environ.get(name, "") for name in (*names, *_JOBS))
