"""MPI, which connects the ranks itself."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import NumberVariables
from keras_dist.clusters.slurm import NUMBERS


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
    """`mpirun` of MPICH and Intel MPI; not a step of SLURM, which may set PMI_RANK.

    Both set it in a batch script of SLURM, where rank 0 has SLURM's number by chance.
    """

    name: ClassVar[str] = "mpirun (MPICH)"
    variables = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        numbers = [environ.get(name) for name in self.variables[:2]]
        is_srun = numbers == [environ.get(name) for name in NUMBERS]
        is_mpi = self.variables[2] in environ  # never by SLURM
        return super().is_here(environ) and (is_mpi or not is_srun)
