"""How ranks of MPI on one machine exchange memory."""

import os
import shutil
from pathlib import Path

from keras_dist.launch import processes

_COPY = "OMPI_MCA_btl_vader_single_copy_mechanism"
XPMEM = Path("/dev/xpmem")

# Bytes in shared memory that a rank may need: Open MPI's segment of 4 MiB, and room.
_BYTES_OF_RANK = 8 << 20


def copying() -> dict[str, str]:
    """The variable by which ranks copy large messages through shared memory.

    Out of the memory of another process takes longer (docs/decisions.md), and some
    containers forbid it, where Open MPI prints an error for each message. Empty if the
    user has set it, or the kernel lets processes map each other's memory (XPMEM).
    """
    return {} if _COPY in os.environ or XPMEM.exists() else {_COPY: "none"}


def parent_of_files(num_ranks: int) -> Path | None:
    """Where the files are that ranks map: in memory; `None` for the temporary folder.

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
