"""Rank and size of a process, and how launchers pass them in the environment."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from keras_dist.launch.environments import can_meet, task_of

SRUN = "srun"

# The store of the job is a process of the first rank, which ends with it.
_processes: list[subprocess.Popen[str]] = []


def meet_by_slurm() -> None:
    """Set the variables by which Horovod finds the other tasks of this step.

    Raises:
        RuntimeError: If the tasks cannot meet.
    """
    task = task_of()
    assert task is not None
    process = subprocess.Popen(
        [sys.executable, "-m", "keras_dist", "slurm-task"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(
            "The tasks of this step of SLURM could not meet; the cause was printed "
            f"above. Received: task {task.number} of {sum(task.counts)}, on "
            f"{task.nodes[task.node]}. Start the script by `srun keras-dist run`, or "
            "remove SLURM's variables from the environment of tasks that are to train "
            "side by side."
        )
    os.environ.update({**json.loads(line), **task.environment()})
    _processes.append(process)


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

# Number and count of the tasks that were started together, as variables of programs
# that do not say how these find each other: they would train side by side.
_STRANGERS = {
    "srun (SLURM)": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # and no secret
    "mpirun (MVAPICH2)": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "torchrun": ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"),
}

# Set by any program that starts tasks over PMIx, which does not say how many.
_PMIX_RANK = "PMIX_RANK"

# Set by `horovodrun --min-np --max-np --host-discovery-script`.
_ELASTIC = "HOROVOD_ELASTIC"

# Variables that launchers set to a different value in each job, or for each task.
_JOBS = (
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
)


@dataclass(frozen=True)
class World:
    """Rank and size of this process; the defaults are those of one process alone.

    Args:
        rank: Number of this process, from 0 (the first rank) to size − 1.
        size: Number of ranks.
        local_rank: Number of this process on its host, from 0.
        local_size: Number of ranks on this host.
        num_hosts: Number of hosts; exact on the first rank, which prints it.

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
    task = task_of(environ)
    if task is not None and sum(task.counts) > 1 and can_meet(environ):
        return SRUN, World(
            rank=task.number,
            size=sum(task.counts),
            local_rank=task.local,
            local_size=task.counts[task.node],
        )
    return None


def check_not_stranded(environ: Mapping[str, str] | None = None) -> None:
    """Check that this process, which no launcher of ours started, is alone.

    `srun -n 2 python script.py` would otherwise be two trainings of all rows, which
    write the same files.

    Args:
        environ: Environment variables; by default those of this process.

    Raises:
        RuntimeError: If several tasks were started.

    >>> check_not_stranded({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    >>> check_not_stranded({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"})  # a job's script
    """
    environ = os.environ if environ is None else environ
    found = None
    for launcher, (task, count) in _STRANGERS.items():
        if task in environ and environ.get(count, "1") not in ("0", "1"):
            found = f"{launcher}, {task}={environ[task]}, {count}={environ[count]}"
            break
    else:
        if environ.get(_PMIX_RANK, "0") != "0":
            found = f"PMIx, {_PMIX_RANK}={environ[_PMIX_RANK]}"
    if found is not None:
        raise RuntimeError(
            "Several tasks were started, and nobody says how they meet: each would "
            f"train alone, and write the same files. Received: {found}. Start the "
            "ranks with `keras-dist run`, `horovodrun` or Open MPI's `mpirun`; under "
            "SLURM set KERAS_DIST_SECRET for all tasks. If they are to "
            "train side by side, remove these variables from their environment."
        )


def check_not_elastic(environ: Mapping[str, str] | None = None) -> None:
    """Check that Horovod's elastic mode has not started this process.

    It changes the ranks inside of living processes, and never again uses the host of
    one that has ended: neither fits a training whose ranks are those of its start.

    Args:
        environ: Environment variables; by default those of this process.

    Raises:
        RuntimeError: If it has.
    """
    environ = os.environ if environ is None else environ
    if environ.get(_ELASTIC, "0") not in ("", "0"):
        raise RuntimeError(
            "keras_dist does not train in Horovod's elastic mode, in which the ranks "
            "of a running process change: it would end at the first change. Received: "
            f"{_ELASTIC}={environ[_ELASTIC]}. Start the script with `keras-dist run "
            "-H a:2,b:2 --restarts 10`, and with `dist_fit(…, resume=folder)`, which "
            "goes on after the loss of a rank or host; or with `horovodrun -np`, "
            "without --min-np, --max-np and --host-discovery-script."
        )


def identity() -> str:
    """A string that differs between ranks and between jobs, from the environment."""
    names = [ranks[0] for ranks in _LAUNCHERS.values()]
    return ":".join(os.environ.get(name, "") for name in (*names, *_JOBS))
