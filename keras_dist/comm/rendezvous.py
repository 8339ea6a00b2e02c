"""The meeting of ranks whose launcher has no rendezvous: rank 0 serves it.

`srun`, `torchrun` and Ray Train tell a process its rank, and where rank 0 is. Rank 0
serves a store there, and from what every rank says of its host it makes the numbers of
all. Then Horovod finds the ranks by the same store.
"""

import atexit
import contextlib
import os
import re
import socket
import subprocess
from dataclasses import replace

from keras_dist.clusters import Place
from keras_dist.clusters.slurm import Slurm
from keras_dist.launch.meeting import Meeting
from keras_dist.launch.monitor.end_note import stay_for_readers
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.signing import derive_secret
from keras_dist.launch.store import make_slots

# Seconds in which all ranks have to come.
_TIMEOUT = 120.0


def meet(place: Place) -> None:
    """Set the variables by which Horovod finds the other ranks of a job.

    Every rank calls it. The job's secret is `KERAS_DIST_SECRET`; without it the store
    answers whoever knows the launcher's variables, as that of `horovodrun` does.

    Args:
        place: Where this rank stands, and where the ranks meet.

    Raises:
        RuntimeError: If ranks are missing after 120 s, if their numbers contradict each
            other, or if the port is in use.
    """
    # By the launcher's name of the host: some ranks may know an address of it alone.
    secret = os.environ.get(SECRET) or derive_secret(place.job, "without a secret")
    if place.launcher == Slurm.name:
        place = replace(place, address=_resolve_node(place.address))
    name = socket.gethostname()
    if place.rank == 0:
        atexit.register(stay_for_readers)  # runs after Horovod's

    try:
        with Meeting(place, secret, kind="rank", name=name, timeout=_TIMEOUT) as ranks:
            own = [name, place.local_rank, place.local_size]
            found = ranks.join(own, lambda all_: {"slots": make_slots(all_)})
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"Rank {place.rank} of {place.size}, started by {place.launcher}, does not "
            f"meet the others. {error}"
        ) from error
    os.environ.update({**ranks.rank_variables(), **found["slots"][place.rank]})


def _resolve_node(node: str) -> str:
    """Return the name of a node, or its address if only SLURM knows the name."""
    with contextlib.suppress(OSError):
        socket.gethostbyname(node)
        return node
    words = ["scontrol", "show", "node", node]
    with contextlib.suppress(OSError):
        text = subprocess.run(words, capture_output=True, text=True).stdout
        if found := re.search(r"NodeAddr=(\S+)", text):
            return found[1]
    return node  # which the error names
