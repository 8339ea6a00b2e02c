"""Launchers with a variable for each number of a rank: Horovod, MPI and torchrun."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from keras_dist.clusters.cluster import (
    MEETING,
    Cluster,
    Place,
    read_meeting,
    read_number,
    read_text,
)
from keras_dist.clusters.slurm import NUMBERS


class NumberVariables(Cluster):
    """A launcher with a variable for each number of a rank."""

    # Rank, size, local rank and local size, of which the last two may be missing.
    variables: ClassVar[Sequence[str]]

    def is_here(self, environ: Mapping[str, str]) -> bool:
        rank, size, *_ = self.variables
        return rank in environ and environ.get(size) != "1"

    def place(self, environ: Mapping[str, str]) -> Place:
        rank, size, local_rank, local_size = self.variables
        return Place(
            launcher=self.name,
            rank=read_number(environ, rank, self.name),
            size=read_number(environ, size, self.name),
            local_rank=read_number({local_rank: "0", **environ}, local_rank, self.name),
            local_size=read_number({local_size: "1", **environ}, local_size, self.name),
            variables=self.variables,
        )


class HorovodVariables(NumberVariables):
    """`keras-dist run`, `horovodrun` and `horovod.spark.run`."""

    name: ClassVar[str] = "horovodrun"
    key: ClassVar[str] = "horovod"
    variables = (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    )

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return self.variables[0] in environ  # one rank is a job, too


class MpiVariables(NumberVariables):
    """A launcher that connects ranks by MPI; or they meet at `KERAS_DIST_RDZV`.

    The first needs a Horovod that was built with MPI.
    """

    key: ClassVar[str] = "mpi"

    def place(self, environ: Mapping[str, str]) -> Place:
        place = super().place(environ)
        if not environ.get(MEETING):
            return place
        return replace(place, **read_meeting(environ, self.name))


class OpenMpi(MpiVariables):
    """`mpirun` of Open MPI."""

    name: ClassVar[str] = "mpirun (Open MPI)"
    variables = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )


# Variables of other launchers that set PMI_RANK and PMI_SIZE, too.
_ALSO_PMI = "PALS_RANKID", "FLUX_TASK_RANK"


class Mpich(MpiVariables):
    """`mpirun` of MPICH and Intel MPI; not others that set PMI_RANK, such as SLURM.

    Both set it in a batch script of SLURM, where rank 0 has SLURM's number by chance.
    """

    name: ClassVar[str] = "mpirun (MPICH)"
    variables = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        numbers = [environ.get(name) for name in self.variables[:2]]
        is_srun = numbers == [environ.get(name) for name in NUMBERS]
        is_mpi = self.variables[2] in environ  # never by SLURM
        is_other = is_srun or any(name in environ for name in _ALSO_PMI)
        return super().is_here(environ) and (is_mpi or not is_other)


class Torchrun(NumberVariables):
    """`torchrun --nproc-per-node 2 script.py`, whose own store has MASTER_PORT."""

    name: ClassVar[str] = "torchrun"
    key: ClassVar[str] = "torchrun"
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        has_size = "WORLD_SIZE" in environ or "MASTER_ADDR" in environ
        return super().is_here(environ) and has_size

    def place(self, environ: Mapping[str, str]) -> Place:
        place = super().place(environ)
        return replace(
            place,
            address=read_text(environ, "MASTER_ADDR", self.name),
            port=read_number(environ, "MASTER_PORT", self.name) + 1,
            variables=(*self.variables, "MASTER_ADDR", "MASTER_PORT"),
        )
