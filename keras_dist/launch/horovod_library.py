"""What the installed Horovod was built with, without importing it."""

import importlib.util
from pathlib import Path

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
