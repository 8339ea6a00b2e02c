"""Where each task of SLURM is a rank: the process by which the tasks meet.

`comm/srun.py` starts one in each rank. That of the first task has the store.
"""

import json
import os
import signal
import sys

from keras_dist.launch import horovod_library
from keras_dist.launch.assignment import SECRET, Assignment, patience, seed_of
from keras_dist.launch.first_host import secret_of, store_if_first
from keras_dist.launch.host_store import HostStore, wait_for
from keras_dist.launch.hosts import address_towards, slots
from keras_dist.launch.meeting import TIMEOUT_SECONDS
from keras_dist.launch.own_name import check_own_name
from keras_dist.launch.rendezvous import secret_of_start, variables_of
from keras_dist.launch.slurm import task_of
from keras_dist.launch.slurm_step import address_of, meeting_of

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
    task = task_of()
    if task is None:
        raise ValueError(
            "This command is for tasks of SLURM. Received: no variables of a step."
        )
    given = os.environ.get(SECRET, "")
    meeting = meeting_of(task, num_ranks=1, secret=given, timeout=TIMEOUT_SECONDS)
    store, address = store_if_first(meeting)
    job = secret_of(meeting, store, address)
    secret = secret_of_start(job, f"{task.job}.{task.step}", 0)
    if store is not None:
        store.open(slots(list(zip(task.nodes, task.counts, strict=True))), secret)
        store.admit(job)
    hosts = HostStore(address, meeting.port, job)
    found = wait_for(hosts, meeting.host, timeout=meeting.timeout)
    assert found is not None
    own, reached = found
    if store is not None and own.startswith("127.") and len(task.nodes) > 1:
        own = address_towards(address_of(task.nodes[1]))
    if not horovod_library.uses_named_network():
        check_own_name(own)
    known = variables_of(reached, meeting.port, secret)
    seed = seed_of(f"{task.job}.{task.step}")
    assignment = Assignment(slots=(), store=known, secret=secret, seed=seed)
    print(json.dumps({**patience(), **assignment.variables(own)}), flush=True)
    if store is not None:
        sys.stdin.read()
    return 0
