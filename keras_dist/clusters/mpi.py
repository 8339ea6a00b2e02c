"""MPI, which connects the ranks itself."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import NumberVariables


class OpenMpi(NumberVariables):
    """`mpirun` of Open MPI."""

    name: ClassVar[str] = "mpirun (Open MPI)"
    variables = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )


class Mpich(NumberVariables):
    """`mpirun` of MPICH and Intel MPI; not a step of SLURM, which may set PMI_RANK."""

    name: ClassVar[str] = "mpirun (MPICH)"
    variables = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        is_srun = environ.get("PMI_RANK") == environ.get("SLURM_PROCID")
        return super().is_here(environ) and not is_srun
