"""How ranks of MPI on one machine may exchange memory: containers forbid some ways."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from keras_dist.launch import processes

_COPY = "OMPI_MCA_btl_vader_single_copy_mechanism"

# Bytes in shared memory that a rank may need: Open MPI's segment of 4 MiB, and room.
_BYTES_OF_RANK = 8 << 20

# A process reads the memory of another one that is not its child, as ranks do. Both
# allow what Open MPI allows (PR_SET_PTRACER), for systems where it has to be allowed.
_TRY = """
import ctypes, os
libc = ctypes.CDLL(None)
class Part(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]
def part(buffer):
    return ctypes.byref(Part(ctypes.addressof(buffer), len(buffer)))
libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
pid, text, copy = os.getpid(), ctypes.create_string_buffer(8), None
child = os.fork()
if child == 0:
    copy = ctypes.create_string_buffer(8)
    os._exit(libc.process_vm_readv(pid, part(copy), 1, part(text), 1, 0) != 8)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""


def copying() -> dict[str, str]:
    """The variable by which ranks copy memory of each other only where they may.

    Else Open MPI prints an error for each message. Empty if the user has set it.
    """
    return {} if _COPY in os.environ or _can_copy() else {_COPY: "none"}


@functools.cache
def _can_copy() -> bool:
    """Whether a process may read the memory of another one of the same user."""
    try:
        command = [sys.executable, "-I", "-S", "-c", _TRY]
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


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
