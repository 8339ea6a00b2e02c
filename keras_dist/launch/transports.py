"""The transport of a job: what Horovod was built with, and what this machine has."""

import shutil

from keras_dist.install import patch
from keras_dist.launch.gpus import num_gpus

TRANSPORTS = ("auto", "gloo", "mpi", "nccl")

# Stand in Horovod's library if it was linked to them.
_LIBRARIES = {"mpi": b"libmpi.", "nccl": b"libnccl."}


def transport_of(requested: str, *, is_one_host: bool) -> str:
    """How the ranks of a job find each other: "gloo" or "mpi".

    Args:
        requested: One of `TRANSPORTS`.
        is_one_host: Whether all of them are on this machine.

    Raises:
        ValueError: If what is requested is not there.
    """
    if requested == "auto":
        return "gloo"  # why not MPI: docs/decisions.md
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
    """The transports that Horovod was built with, without importing it."""
    library = patch.installed_library()
    content = b"" if library is None else library.read_bytes()
    return ["gloo", *(name for name, text in _LIBRARIES.items() if text in content)]


def _why_no_mpi() -> str:
    if "mpi" not in built():
        return (
            "Horovod was built without MPI. With Open MPI (apt-get install "
            "libopenmpi-dev openmpi-bin): keras-dist install-horovod --mpi"
        )
    if shutil.which("mpirun") is None:
        return "`mpirun` is missing: apt-get install openmpi-bin"
    return ""


def _why_no_nccl() -> str:
    if "nccl" not in built():
        return "Horovod was built without NCCL: keras-dist install-horovod --nccl"
    return "" if num_gpus() else "nvidia-smi lists no GPU here"
