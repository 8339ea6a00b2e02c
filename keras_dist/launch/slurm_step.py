"""Under SLURM: the tasks of a step meet without options."""

import re
import signal
import socket
import subprocess
from dataclasses import replace

from keras_dist.launch.failures import print_message
from keras_dist.launch.gpus import num_gpus
from keras_dist.launch.meeting import Meeting
from keras_dist.launch.signals import SAVED
from keras_dist.launch.slurm import Task

_SECONDS = 30.0

# What SLURM says of a job that `scancel` ends.
_CANCELLED = re.compile(r"JobState=(COMPLETING|CANCELLED) Reason=None")


def meeting_of(
    task: Task, *, num_ranks: int | None, secret: str, timeout: float
) -> Meeting:
    """Where the tasks of this step meet.

    Args:
        task: The task that this process is.
        num_ranks: Number of ranks of each task; `None` for one for each GPU of a node
            that has one task, else for one.
        secret: Secret of the job; empty for one that munge passes.
        timeout: Seconds to wait for the other tasks.
    """
    has_node = task.counts[task.node] == 1
    names = [n for n, c in zip(task.nodes, task.counts, strict=True) for _ in range(c)]
    return Meeting(
        address=address_of(task.nodes[0]),
        port=task.port,
        num_hosts=sum(task.counts),
        num_ranks=num_ranks or (num_gpus() if has_node else 0) or 1,
        secret=secret,
        number=task.position,
        timeout=timeout,
        host=task.nodes[task.node],
        names=names,
        is_quiet=True,
        saved_code=SAVED,
        has_munge=not secret,
        signals=(signal.SIGUSR1,),
    )


def with_least(meeting: Meeting, least: int, most: int) -> Meeting:
    """The same, for tasks of which some may be lost; no others come in a step.

    Args:
        meeting: Where all tasks of the step meet.
        least: How many tasks at least.
        most: How many at most, the user thinks.

    Raises:
        ValueError: If the step has another number of tasks.
    """
    if not 1 <= least <= meeting.num_hosts <= most:
        raise ValueError(
            "In a step of SLURM `--nnodes` says how few of its tasks are enough, and "
            f"at most as many as it has. Received: --nnodes {least}:{most}, and "
            f"{meeting.num_hosts} tasks."
        )
    return replace(meeting, min_hosts=least)


def address_of(node: str) -> str:
    """The name of a node, or its address if the name does not resolve.

    Raises:
        ValueError: If there is none.
    """
    try:
        socket.gethostbyname(node)
    except OSError:
        found = re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", node))
        if found is None:
            raise ValueError(
                f"The address of a node of this step is not known. Received: {node}. "
                "Its name has to resolve, or `scontrol show node` has to answer."
            ) from None
        return found[1]
    return node


def requeue(task: Task) -> None:
    """Ask SLURM to start the job again, unless it was cancelled; it ends this one."""
    # A job at its time limit has another reason.
    if _CANCELLED.search(_scontrol("show", "job", str(task.job))):
        return
    print_message(f"keras-dist: job {task.job} is to start again.")
    answer = _scontrol("requeue", str(task.job))
    if answer:
        print_message(f"keras-dist: {answer}")


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.strip()
