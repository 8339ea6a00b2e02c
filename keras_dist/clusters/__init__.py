"""Who started this process, and which rank it is: one class for each launcher.

A class answers from the environment alone; none of them starts anything. To support
another launcher, write such a class, and name it in the entry points of a package, in
the group `keras_dist.clusters`; or here, in `CLUSTERS`.
"""

import functools
import os
from collections.abc import Mapping
from importlib.metadata import entry_points

from keras_dist.clusters.by_mpi4py import Mpi4py
from keras_dist.clusters.cluster import MEETING, Cluster, Place, add_meeting
from keras_dist.clusters.numbered import (
    Flux,
    HorovodVariables,
    IndexedJob,
    Mpich,
    OpenMpi,
    Pals,
    Torchrun,
)
from keras_dist.clusters.slurm import Slurm
from keras_dist.clusters.tf_config import TfConfig

__all__ = ["CLUSTERS", "Cluster", "Place", "find_place"]

# The variable by which users choose one, and its value for a process that is no rank.
VARIABLE, NONE = "KERAS_DIST_CLUSTER", "none"

# In the order in which they are tried. The variables of the first one count above all:
# a rank also sets them itself, when it has met the others.
CLUSTERS: list[Cluster] = [
    HorovodVariables(),
    Mpi4py(),
    OpenMpi(),
    Mpich(),
    Pals(),
    Flux(),
    Slurm(),
    Torchrun(),
    TfConfig(),
    IndexedJob(),
]


def find_place(environ: Mapping[str, str] | None = None) -> Place | None:
    """Return the place of this process in its job; `None` if it is on its own.

    Args:
        environ: Environment variables; by default this process's.

    Raises:
        ValueError: If a launcher's variables are incomplete or contradict each other,
            if two launchers have set theirs and `KERAS_DIST_CLUSTER` chooses none, or
            if it chooses one that does not exist.

    >>> find_place({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}).launcher
    'horovodrun'
    """
    environ = os.environ if environ is None else environ
    choice, horovod = environ.get(VARIABLE, ""), CLUSTERS[0]
    if choice == NONE:
        return None
    if horovod.is_here(environ):
        return horovod.place(environ)
    every = [*CLUSTERS, *_load_plugins()]
    if choice and choice not in {each.key for each in every}:
        keys = ", ".join(dict.fromkeys(each.key for each in every))
        raise ValueError(
            f"{VARIABLE} names no launcher. Received: {VARIABLE}={choice}. Use one of "
            f"{keys}; or {NONE} for a process that is no rank."
        )
    found = [c for c in every if choice in ("", c.key) and c.is_here(environ)]
    if len(found) > 1 and Slurm.has_one_task_per_node(environ):
        # Such a step starts the daemons of other launchers.
        found = [cluster for cluster in found if cluster.name != Slurm.name]
    if not found:
        return None
    first = found[0].place(environ)
    if environ.get(MEETING):
        first = add_meeting(first, environ)
    if len(found) > 1:
        other = found[1].place(environ)
        raise ValueError(
            f"Two launchers say which rank this process is. Received: rank {first.rank}"
            f" of {first.size} by {first.launcher}, and rank {other.rank} of "
            f"{other.size} by {other.launcher}. Start the script by one of them, or "
            f"choose: {VARIABLE}={found[0].key}, or {found[1].key}."
        )
    return first


@functools.cache
def _load_plugins() -> tuple[Cluster, ...]:
    """Make the clusters that installed packages have in their entry points."""
    found = entry_points(group="keras_dist.clusters")
    return tuple(each.load()() for each in found)
