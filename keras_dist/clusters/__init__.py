"""Who started this process, and which rank it is: one class for each launcher.

A class answers from the environment alone; none of them starts anything. To support
another launcher, write such a class in a file of its own, and add it to `CLUSTERS`.
"""

import os
from collections.abc import Mapping

from keras_dist.clusters.cluster import Cluster, Place
from keras_dist.clusters.kubernetes import IndexedJob
from keras_dist.clusters.numbered import HorovodVariables, Mpich, OpenMpi, Torchrun
from keras_dist.clusters.slurm import Slurm
from keras_dist.clusters.tf_config import TfConfig

__all__ = ["CLUSTERS", "Cluster", "Place", "find_place"]

# In the order in which they are tried.
CLUSTERS: list[Cluster] = [
    HorovodVariables(),
    OpenMpi(),
    Mpich(),
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
            or if two launchers have set theirs.

    >>> find_place({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}).launcher
    'horovodrun'
    """
    environ = os.environ if environ is None else environ
    found = [cluster for cluster in CLUSTERS if cluster.is_here(environ)]
    if len(found) > 1 and Slurm.has_one_task_per_node(environ):
        # Such a step starts the daemons of other launchers.
        found = [cluster for cluster in found if cluster.name != Slurm.name]
    if not found:
        return None
    first = found[0].place(environ)
    if len(found) > 1 and first.launcher != HorovodVariables.name:
        other = found[1].place(environ)
        raise ValueError(
            f"Two launchers say which rank this process is. Received: rank {first.rank}"
            f" of {first.size} by {first.launcher}, and rank {other.rank} of "
            f"{other.size} by {other.launcher}. Start the script by one of them, or "
            f"unset the variables of the other one: {', '.join(other.variables)}."
        )
    return first
