"""Where each task of SLURM is a rank: the process by which the tasks meet.

`comm/world.py` starts one in each rank. That of the first task has the store.
"""

import json
import os
import signal
import sys

from keras_dist.launch import horovod_library
from keras_dist.launch.environments import address_of, slurm, task_of
from keras_dist.launch.hosts import slots
from keras_dist.launch.meeting import TIMEOUT_SECONDS, check, store_if_first
from keras_dist.launch.network import address_towards, check_own_name
from keras_dist.launch.ranks import Assignment, connect_timeout, seed_of
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.store import StoreClient, secret_of_start, variables_of

# SLURM signals all processes, and the ranks are to save.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def serve() -> int:
    """Print the variables of this task as a rank; serve the store if it is the first.

    It ends when its standard input does, that is with the rank.

    Raises:
        RuntimeError: If Horovod is not installed.
        ValueError: If the tasks cannot meet.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    task, place = task_of(), slurm(os.environ)
    if task is None or place is None:
        raise ValueError(
            "This command is for tasks of SLURM. Received: no variables of a step."
        )
    job = os.environ.get(SECRET, "")
    check(place, job)
    store, address = store_if_first(place)
    secret = secret_of_start(job, f"{task.job}.{task.step}", 0)
    if store is not None:
        store.open(slots(list(zip(task.nodes, task.counts, strict=True))), secret)
        store.admit(job)
    client = StoreClient(address, place.port, job)
    found = client.wait(place.host, timeout=TIMEOUT_SECONDS)
    assert found is not None
    own, reached = found
    if store is not None and own.startswith("127.") and len(task.nodes) > 1:
        own = address_towards(address_of(task.nodes[1]))
    if not horovod_library.uses_named_network():
        check_own_name(own)
    known = variables_of(reached, place.port, secret)
    seed = seed_of(f"{task.job}.{task.step}")
    assignment = Assignment(slots=(), store=known, secret=secret, seed=seed)
    variables = {**connect_timeout(), **assignment.variables(own)}
    print(json.dumps(variables), flush=True)
    if store is not None:
        sys.stdin.read()
    return 0
