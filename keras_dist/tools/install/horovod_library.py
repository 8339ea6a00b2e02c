"""Whether the installed Horovod has our changes, without importing it."""

import importlib.util
from pathlib import Path

# Stand in the library if it was compiled from the changed source: texts of debug
# messages, and names of variables.
MARKS = (
    "keras_dist: process sets use the network interface ",
    "KERAS_DIST_LONGEST_CYCLE_MS",
    "KERAS_DIST_READ_MEMORY",
    "keras_dist: the sum is in place",
)


def installed_library() -> Path | None:
    """Horovod's library in this environment, without importing it; or `None`."""
    found = importlib.util.find_spec("horovod")
    for folder in (found and found.submodule_search_locations) or []:
        for library in Path(folder).glob("tensorflow/mpi_lib*.so"):
            return library
    return None


def is_installed() -> bool:
    """Return True if a Horovod is installed that was compiled from our source."""
    library = installed_library()
    content = b"" if library is None else library.read_bytes()
    return all(mark.encode() in content for mark in MARKS)
