"""Launchers with a variable for each number of a rank."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from keras_dist.clusters.cluster import (
    Cluster,
    Place,
    add_meeting,
    read_number,
    read_text,
)
from keras_dist.clusters.slurm import NUMBERS

# Of a `Place`.
_NUMBERS = "rank", "size", "local_rank", "local_size"


class NumberVariables(Cluster):
    """A launcher with a variable for each number of a rank."""

    # Rank, size, local rank and local size, of which the last two may be missing.
    variables: ClassVar[Sequence[str]]

    def is_here(self, environ: Mapping[str, str]) -> bool:
        rank, size, *_ = self.variables
        return rank in environ and environ.get(size) != "1"

    def place(self, environ: Mapping[str, str]) -> Place:
        defaults = dict(zip(self.variables[2:], ("0", "1"), strict=False))
        numbers: dict[str, Any] = {
            field: read_number({**defaults, **environ}, name, self.name)
            for field, name in zip(_NUMBERS, self.variables, strict=False)
        }
        return Place(self.name, **numbers, variables=self.variables)


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


class OpenMpi(NumberVariables):
    """`mpirun` of Open MPI.

    MPI connects the ranks if Horovod was built with it; else `KERAS_DIST_RDZV` does.
    """

    name: ClassVar[str] = "mpirun (Open MPI)"
    key: ClassVar[str] = "mpi"
    variables = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )


# Variables of other launchers that set PMI_RANK and PMI_SIZE, too.
_ALSO_PMI = "PALS_RANKID", "FLUX_TASK_RANK"


class Mpich(NumberVariables):
    """`mpirun` of MPICH and Intel MPI; not others that set PMI_RANK, such as SLURM.

    Both set it in a batch script of SLURM, where rank 0 has SLURM's number by chance.
    """

    name: ClassVar[str] = "mpirun (MPICH)"
    key: ClassVar[str] = OpenMpi.key
    variables = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        numbers = [environ.get(name) for name in self.variables[:2]]
        is_srun = numbers == [environ.get(name) for name in NUMBERS]
        is_mpi = self.variables[2] in environ  # never by SLURM
        is_other = is_srun or any(name in environ for name in _ALSO_PMI)
        return super().is_here(environ) and (is_mpi or not is_other)


class Pals(NumberVariables):
    """`mpiexec` of Cray PALS (ALCF, and other machines of HPE with PBS)."""

    name: ClassVar[str] = "mpiexec (Cray PALS)"
    key: ClassVar[str] = "pals"
    variables = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")


class Flux(NumberVariables):
    """`flux run -n 4 python script.py`; on several nodes, with `KERAS_DIST_RDZV`.

    The job has an identifier in digits and letters, from which the port follows.
    """

    name: ClassVar[str] = "flux run"
    key: ClassVar[str] = "flux"
    variables = (
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        "FLUX_JOB_NNODES",
    )

    def place(self, environ: Mapping[str, str]) -> Place:
        names = self.variables
        numbers = (read_number(environ, name, self.name) for name in names)
        rank, size, local_rank, nodes = numbers
        # The first nodes have one more, if the tasks are not divided evenly.
        each, more = divmod(size, nodes)
        local_size = each + (rank < more * (each + 1))
        place = Place(self.name, rank, size, local_rank, local_size, variables=names)
        if nodes > 1:
            return add_meeting(place, environ)
        job = environ.get("FLUX_JOB_ID", "")
        port = 20_000 + zlib.crc32(job.encode()) % 10_000
        return replace(place, address="127.0.0.1", port=port)


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


class IndexedJob(NumberVariables):
    """The pods of a Kubernetes Indexed Job, each with one rank.

    Kubernetes sets the index; the manifest sets the size and `KERAS_DIST_RDZV`.
    """

    name: ClassVar[str] = "Kubernetes"
    key: ClassVar[str] = "kubernetes"
    variables = ("JOB_COMPLETION_INDEX", "KERAS_DIST_NNODES")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return self.variables[1] in environ and super().is_here(environ)

    def place(self, environ: Mapping[str, str]) -> Place:
        return add_meeting(super().place(environ), environ)
