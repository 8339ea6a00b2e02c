"""Any launcher of MPI, by the package mpi4py; only if the user asks for it."""

import importlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

from keras_dist.clusters.cluster import Cluster, Place

# What MPI has said to this process, in JSON: those that it starts must not ask, too.
_ANSWER = "KERAS_DIST_MPI4PY"


class Mpi4py(Cluster):
    """`KERAS_DIST_CLUSTER=mpi4py`: MPI says the numbers, and where the ranks meet."""

    name: ClassVar[str] = "mpi4py"
    key: ClassVar[str] = "mpi4py"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        is_chosen = environ.get("KERAS_DIST_CLUSTER") == self.key
        return is_chosen and (_ANSWER in environ or _world().size > 1)

    def place(self, environ: Mapping[str, str]) -> Place:
        if _ANSWER not in environ:  # a collective, once
            os.environ[_ANSWER] = json.dumps(_ask())
        return Place(self.name, *json.loads(os.environ[_ANSWER]))


def _world() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI").COMM_WORLD
    except Exception as error:  # also if the library of MPI is missing
        raise ValueError(
            "mpi4py cannot be used here. Received: KERAS_DIST_CLUSTER=mpi4py, and "
            f"{type(error).__name__}: {error}. Install it for the MPI of this machine: "
            "`pip install --no-binary mpi4py mpi4py`."
        ) from error


def _ask() -> list[Any]:
    """Return rank, size, local rank, local size, and where rank 0 serves a meeting."""
    world = _world()
    host = world.Split_type(importlib.import_module("mpi4py.MPI").COMM_TYPE_SHARED)
    with socket.socket() as probe:
        probe.bind(("", 0))
        own = socket.gethostname(), probe.getsockname()[1]
    return [world.rank, world.size, host.rank, host.size, *world.bcast(own)]
