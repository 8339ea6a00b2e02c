"""MPI between the ranks of one machine, with `mpirun` as no more than their server.

The processes of a job of MPI find each other by a server (PMIx), which is a part of
`mpirun`, and whose address stands in their environment. Here `mpirun` starts a program
for each rank that writes this environment down, and waits. A rank is started by the
launcher itself, with those variables: what it prints, how it ends, who watches it and
who ends it is the same over Gloo and over MPI.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from keras_dist.launch import mpi_ports, processes
from keras_dist.launch.failures import print_message

# Writes its environment, which it renames so that it is whole, and waits to be ended.
_RELAY = (
    'own="$0/$OMPI_COMM_WORLD_RANK"; env -0 > "$own.new" && mv "$own.new" "$own.env" '
    "&& exec sleep 2147483647"
)

# Of its variables, those by which a process finds the server, and by which MPI works.
_OF_MPI = ("OMPI_", "ORTE_", "PMIX_")

# Variables of the system that has started this process, from which `mpirun` would take
# hosts and cores; of them, those that a user may have set for MPI; and what a process
# has that is itself a rank of MPI.
_OF_OTHERS = (*_OF_MPI, "PMI_", "SLURM_", "LSB_", "PBS_")
_OF_USER = "OMPI_MCA_"
_OF_RANK = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK")

_SECONDS, _TICK = 60.0, 0.02

# How ranks of one machine copy large messages.
_COPY = "OMPI_MCA_btl_vader_single_copy_mechanism"
XPMEM = Path("/dev/xpmem")

# Bytes in shared memory that a rank may need: Open MPI's segment of 4 MiB, and room.
_BYTES_OF_RANK = 8 << 20


@contextlib.contextmanager
def variables(
    transport: str, job: str, num_ranks: int, *, may_use_gloo: bool
) -> Iterator[dict[int, dict[str, str]]]:
    """Inside the block, yield the variables that each rank needs in addition.

    Args:
        transport: "mpi", or another one, for which no rank needs any.
        job: Id of the job.
        num_ranks: Number of ranks.
        may_use_gloo: Whether the ranks use Gloo if the server does not start.

    Raises:
        OSError, RuntimeError: If the server cannot be started, and Gloo may not be used
            instead.
    """
    own: dict[int, dict[str, str]] = {}
    with contextlib.ExitStack() as left:
        if transport == "mpi":
            try:
                own = left.enter_context(server(job, num_ranks))
            except (OSError, RuntimeError) as error:
                if not may_use_gloo:
                    raise
                print_message(_instead(error))
        yield own


def _instead(error: Exception) -> str:
    """Return what is said, in one line, where Gloo is used instead."""
    received = " ".join(str(error).split())
    return (
        "keras-dist: `mpirun` did not start, by which ranks of one machine find each "
        f"other over MPI: Gloo is used instead. Received: {received}"
    )


@contextlib.contextmanager
def server(job: str, num_ranks: int) -> Iterator[dict[int, dict[str, str]]]:
    """Inside the block, `mpirun` is the server of so many ranks of this machine.

    Its processes are some of the job's, which are ended by `processes.end`.

    Args:
        job: Id of the job.
        num_ranks: Number of ranks.

    Yields:
        For each rank the environment variables that it needs in addition.

    Raises:
        RuntimeError: If `mpirun` cannot be started.
    """
    folder = processes.make_folder(job)
    memory = processes.make_folder(job, parent_of_files(num_ranks))
    with contextlib.ExitStack() as left:
        for each in (folder, memory):
            left.callback(shutil.rmtree, each, ignore_errors=True)
        log = left.enter_context(open(folder / "log", "wb"))
        process = subprocess.Popen(
            _command(folder, num_ranks),
            env={**environment_of_server(os.environ), processes.mark(job): "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        left.callback(_end, process)
        _wait(process, folder, num_ranks)
        left.enter_context(mpi_ports.closed(process.pid, num_ranks))
        common = {
            "HOROVOD_CONTROLLER": "mpi",
            "HOROVOD_CPU_OPERATIONS": "mpi",
            "OMPI_MCA_btl": "self,vader",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # a rank computes on the same core
            "OMPI_MCA_btl_vader_backing_directory": str(memory),
            **copying(),
        }
        yield {
            rank: common | _variables(folder / f"{rank}.env")
            for rank in range(num_ranks)
        }


def environment_of_server(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of `mpirun`: without what says where another job runs.

    In a shell of `salloc` it would start programs by SLURM, and in a rank of another
    job of MPI it would look for that job's server.

    >>> environment_of_server({"SLURM_JOB_ID": "7", "OMPI_MCA_a": "1", "HOME": "/h"})
    {'OMPI_MCA_a': '1', 'HOME': '/h'}
    >>> environment_of_server({"PMIX_RANK": "0", "OMPI_MCA_a": "1", "HOME": "/h"})
    {'HOME': '/h'}
    """
    of_user = () if any(name in environ for name in _OF_RANK) else _OF_USER
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(of_user) or not name.startswith(_OF_OTHERS)
    }


def _command(folder: Path, num_ranks: int) -> list[str]:
    """Return the command of the server."""
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    # Nobody else connects: all is on this machine.
    words += ["--mca", "oob_tcp_if_include", "lo"]
    # If a rank fails, the launcher decides what happens to the others.
    words += ["--enable-recovery", "--mca", "orte_tmpdir_base", str(folder)]
    return [*words, "-np", str(num_ranks), "sh", "-c", _RELAY, str(folder)]


def _wait(process: subprocess.Popen[bytes], folder: Path, num_ranks: int) -> None:
    """Wait until the server has started a program for each rank."""
    begin = time.monotonic()
    while len(list(folder.glob("*.env"))) < num_ranks:
        is_late = time.monotonic() - begin > _SECONDS
        if is_late or process.poll() is not None:
            text = (folder / "log").read_text(errors="replace").strip()
            raise RuntimeError(
                "`mpirun` did not start the server by which ranks find each other. "
                f"Received: {text or 'no message'}. `keras-dist run --transport gloo` "
                "needs no MPI."
            )
        time.sleep(_TICK)


def _variables(path: Path) -> dict[str, str]:
    pairs = [pair.split("=", 1) for pair in path.read_text().split("\0") if "=" in pair]
    return {name: value for name, value in pairs if name.startswith(_OF_MPI)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server, and with it the programs that it has started."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def copying() -> dict[str, str]:
    """Return the variable by which ranks copy large messages through shared memory.

    Out of the memory of another process takes longer (docs/decisions.md), and some
    containers forbid it, where Open MPI prints an error for each message. Empty if the
    user has set it, or the kernel lets processes map each other's memory (XPMEM).
    """
    return {} if _COPY in os.environ or XPMEM.exists() else {_COPY: "none"}


def parent_of_files(num_ranks: int) -> Path | None:
    """Return where files that ranks map are; `None` for the temporary folder.

    Containers of Docker have 64 MB in `/dev/shm`, and a rank that writes to a file
    there that does not fit is ended by SIGBUS.

    Args:
        num_ranks: Number of ranks.
    """
    memory = processes.SHARED_MEMORY
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        return None
    is_enough = shutil.disk_usage(memory).free >= num_ranks * _BYTES_OF_RANK
    return memory if is_enough else None
