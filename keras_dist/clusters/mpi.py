"""MPI's launchers, whose ranks find each other by MPI."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import Cluster, Place, read_number


class OpenMpi(Cluster):
    """`mpirun` of Open MPI."""

    name: ClassVar[str] = "mpirun (Open MPI)"
    variables: ClassVar[tuple[str, str, str, str]] = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )

    def is_here(self, environ: Mapping[str, str]) -> bool:
        rank, size, *_ = self.variables
        return rank in environ and environ.get(size) != "1"

    def place(self, environ: Mapping[str, str]) -> Place:
        rank, size, local_rank, local_size = self.variables
        return Place(
            launcher=self.name,
            rank=read_number(environ, rank, self.name),
            size=read_number(environ, size, self.name),
            local_rank=int(environ.get(local_rank, 0)),
            local_size=int(environ.get(local_size, 1)),
            variables=self.variables,
        )


class Mpich(OpenMpi):
    """`mpirun` of MPICH and Intel MPI; not a step of SLURM, which may set PMI_RANK."""

    name: ClassVar[str] = "mpirun (MPICH)"
    variables: ClassVar[tuple[str, str, str, str]] = (
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    )

    def is_here(self, environ: Mapping[str, str]) -> bool:
        is_srun = environ.get("PMI_RANK") == environ.get("SLURM_PROCID")
        return super().is_here(environ) and not is_srun
