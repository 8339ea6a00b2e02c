"""SLURM: the tasks of a step, which `srun` starts, meet without options."""

import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from signal import SIGUSR1
from typing import ClassVar, Self

from keras_dist.launch.environments.environment import Environment
from keras_dist.launch.failures import print_message
from keras_dist.launch.processes import SAVED
from keras_dist.launch.slurm_tasks import Task, task_of

_SECONDS = 30.0

# What SLURM says of a job that `scancel` ends.
_CANCELLED = re.compile(r"JobState=(COMPLETING|CANCELLED) Reason=None")


class Slurm(Environment):
    """A task of a step of SLURM; each counts as a host.

    Args:
        task: The task.
    """

    name: ClassVar[str] = "SLURM"
    is_quiet = True
    has_munge = True
    can_requeue = True
    saved_code = SAVED
    signals = (SIGUSR1,)

    def __init__(self, task: Task) -> None:
        self._task = task
        self.port = task.port
        # A task that shares its node does not get all its GPUs.
        self.num_ranks = None if task.counts[task.node] == 1 else 1

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        task = task_of(environ)
        return None if task is None else cls(task)

    @property
    def num_hosts(self) -> int:
        return sum(self._task.counts)

    @property
    def host_number(self) -> int:
        return self._task.position

    @property
    def first_host(self) -> str:
        return address_of(self._task.nodes[0])

    @property
    def host_name(self) -> str:
        return self._task.nodes[self._task.node]

    @property
    def host_names(self) -> Sequence[str]:
        pairs = zip(self._task.nodes, self._task.counts, strict=True)
        return [node for node, count in pairs for _ in range(count)]

    def requeue(self) -> None:
        """Ask SLURM to start the job again, unless it was canceled."""
        # A job at its time limit has another reason.
        job = str(self._task.job)
        if _CANCELLED.search(_scontrol("show", "job", job)):
            return
        print_message(f"keras-dist: job {job} is to start again.")
        if answer := _scontrol("requeue", job):
            print_message(f"keras-dist: {answer}")


def address_of(node: str) -> str:
    """Return the name of a node, or its address if the name does not resolve.

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
