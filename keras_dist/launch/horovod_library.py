"""What the installed Horovod was built with, without importing it; the transport."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from keras_dist.launch.hosts import num_gpus
from keras_dist.launch.systems import OPEN_MPI, here, this_system

TRANSPORTS = ("auto", "gloo", "mpi", "nccl")

# Stand in Horovod's library if it was linked to them.
_LIBRARIES = {"mpi": b"libmpi.", "nccl": b"libnccl."}

# By its variables and options the launcher and `mpirun` understand each other.
_OPEN_MPI = "(Open MPI) 4."

# By these a user requests Gloo from Horovod itself.
_OF_HOROVOD = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")

_VERSION_SECONDS = 20.0

# Stand in the library if it was compiled from the changed source: texts of debug
# messages, and names of variables.
NETWORK_MARK = "keras_dist: process sets use the network interface "
MARKS = (
    NETWORK_MARK,
    "KERAS_DIST_LONGEST_CYCLE_MS",
    "keras_dist: ranks read each other's memory, parts too",
    "keras_dist: the sum is in place",
)

# In a library that was built with MPI: a text of Horovod's own, and the mark.
_HAS_MPI, MPI_MARK = b"MPI_Allreduce failed", "keras_dist: the sum is in pieces of "


def transport_of(requested: str, *, is_one_host: bool, num_ranks: int) -> str:
    """Return how the ranks of a job find each other: "gloo" or "mpi".

    Args:
        requested: One of `TRANSPORTS`.
        is_one_host: Whether all of them are on this machine.
        num_ranks: How many they are.

    Raises:
        ValueError: If what is requested is not there.
    """
    if requested == "auto":
        is_set = any(os.environ.get(name, "mpi") != "mpi" for name in _OF_HOROVOD)
        # Ranks of MPI spin while they wait, which takes time from others of their core.
        is_faster = is_one_host and 1 < num_ranks <= len(os.sched_getaffinity(0))
        is_mpi = is_faster and not (is_set or num_gpus() or _why_no_mpi())
        return "mpi" if is_mpi else "gloo"
    if requested == "mpi":
        why = (
            _why_no_mpi()
            if is_one_host
            else (
                "it is for the ranks of one machine. On several hosts start them by "
                "`mpirun`"
            )
        )
    else:
        why = _why_no_nccl() if requested == "nccl" else ""
    if why:
        raise ValueError(
            f"`--transport {requested}` cannot be used: {why}. Received: Horovod with "
            f"{', '.join(built())}."
        )
    return "mpi" if requested == "mpi" else "gloo"


def built() -> list[str]:
    """Return the transports that Horovod was built with, without importing it."""
    library = installed_library()
    content = b"" if library is None else library.read_bytes()
    return ["gloo", *(name for name, text in _LIBRARIES.items() if text in content)]


def _why_no_mpi() -> str:
    if "mpi" not in built():
        return (
            f"Horovod was built without MPI. With Open MPI ({here(OPEN_MPI)}): "
            "keras-dist install-horovod --mpi"
        )
    if shutil.which("mpirun") is None:
        command = here("apt-get install openmpi-bin")
        return f"`mpirun` is missing: {command} ({this_system().note})"
    version = _version()
    return "" if _OPEN_MPI in version else f"`mpirun` is not Open MPI 4, but: {version}"


def _version() -> str:
    """Return the first line that `mpirun --version` prints, or why there is none."""
    try:
        done = subprocess.run(
            ["mpirun", "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stdout.strip() or done.stderr.strip() or "no text").splitlines()
    return lines[0]


def _why_no_nccl() -> str:
    if "nccl" not in built():
        return "Horovod was built without NCCL: keras-dist install-horovod --nccl"
    return "" if num_gpus() else "nvidia-smi lists no GPU here"


def is_patched(library: Path) -> bool:
    """Return whether a library of Horovod was compiled from the changed source."""
    content = library.read_bytes()
    marks = (*MARKS, MPI_MARK) if _HAS_MPI in content else MARKS
    return all(mark.encode() in content for mark in marks)


def installed_library() -> Path | None:
    """Horovod's library in this environment, without importing it; or `None`."""
    found = importlib.util.find_spec("horovod")
    for folder in (found and found.submodule_search_locations) or []:
        for library in Path(folder).glob("tensorflow/mpi_lib*.so"):
            return library
    return None


def is_installed() -> bool:
    """Return whether a Horovod is installed, and has all changes."""
    library = installed_library()
    return library is not None and is_patched(library)


def uses_named_network() -> bool:
    """Return whether the Horovod of this environment needs no name of a host's own.

    One that an earlier version of this package has built has this change, too.
    """
    library = installed_library()
    return library is not None and NETWORK_MARK.encode() in library.read_bytes()
