"""Launchers that have a rendezvous of their own: Horovod's, ours, and MPI's."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import Cluster, Place, read_number


class FourNumbers(Cluster):
    """A launcher with a variable for each number of a rank."""

    # Rank, size, local rank and local size, of which the last two may be missing.
    variables: ClassVar[tuple[str, str, str, str]]

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


class HorovodVariables(FourNumbers):
    """A launcher that has a rendezvous, and describes it to Horovod itself."""

    name: ClassVar[str] = "horovodrun"
    variables = (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    )

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return self.variables[0] in environ  # one rank is a job, too


class OpenMpi(FourNumbers):
    """`mpirun` of Open MPI."""

    name: ClassVar[str] = "mpirun (Open MPI)"
    variables = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )


class Mpich(FourNumbers):
    """`mpirun` of MPICH and Intel MPI; not a step of SLURM, which may set PMI_RANK."""

    name: ClassVar[str] = "mpirun (MPICH)"
    variables = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        is_srun = environ.get("PMI_RANK") == environ.get("SLURM_PROCID")
        return super().is_here(environ) and not is_srun
