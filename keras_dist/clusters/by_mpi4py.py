"""Any launcher of MPI, by the package mpi4py; only if the user asks for it."""

import functools
import importlib
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

from keras_dist.clusters.cluster import Cluster, Place


class Mpi4py(Cluster):
    """`KERAS_DIST_CLUSTER=mpi4py`: MPI says the numbers, and where the ranks meet."""

    name: ClassVar[str] = "mpi4py"
    key: ClassVar[str] = "mpi4py"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return environ.get("KERAS_DIST_CLUSTER") == self.key and _world().size > 1

    def place(self, environ: Mapping[str, str]) -> Place:
        return _ask()


def _world() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI").COMM_WORLD
    except Exception as error:  # also if the library of MPI is missing
        raise ValueError(
            "mpi4py cannot be used here. Received: KERAS_DIST_CLUSTER=mpi4py, and "
            f"{type(error).__name__}: {error}. Install it for the MPI of this machine: "
            "`pip install --no-binary mpi4py mpi4py`."
        ) from error


@functools.cache
def _ask() -> Place:
    """Ask all ranks; once, since it is a collective."""
    world = _world()
    host = world.Split_type(importlib.import_module("mpi4py.MPI").COMM_TYPE_SHARED)
    address, port = world.bcast(_reserve() if world.rank == 0 else None)
    numbers = world.rank, world.size, host.rank, host.size
    return Place(Mpi4py.name, *numbers, address=address, port=port)


def _reserve() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return socket.gethostname(), probe.getsockname()[1]
