"""SLURM: the tasks of a step, which `srun` starts, meet without options."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import SIGUSR1
from typing import ClassVar, Self

from keras_dist.launch.environments.environment import Environment
from keras_dist.launch.processes import SAVED

# Of the step, and not of the job, which may be larger.
_NODES, _COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_OWN = (
    "SLURM_PROCID",
    "SLURM_NODEID",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)

# Steps of different jobs may begin on one host.
_FIRST_PORT, _NUM_PORTS, _APART = 20_000, 10_000, 101

_SECONDS = 30.0


@dataclass(frozen=True)
class Task:
    """One task of a step of SLURM.

    Args:
        number: Number of the task in the step.
        node: Number of its node in the step.
        local: Number of the task on its node.
        job: Id of the job.
        step: Id of the step.
        nodes: Names of the step's nodes.
        counts: Number of tasks on each node.
    """

    number: int
    node: int
    local: int
    job: int
    step: int
    nodes: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def position(self) -> int:
        """Number of the task, counted node by node, however tasks are distributed."""
        return sum(self.counts[: self.node]) + self.local

    @property
    def port(self) -> int:
        """The port at which the tasks of the step meet, on the first node."""
        return _FIRST_PORT + (self.job * _APART + self.step) % _NUM_PORTS

    def environment(self) -> dict[str, str]:
        """Horovod's variables where each task is a rank."""
        crossing = [k for k, count in enumerate(self.counts) if count > self.local]
        return {
            "HOROVOD_HOSTNAME": self.nodes[self.node],
            "HOROVOD_RANK": str(self.number),
            "HOROVOD_SIZE": str(sum(self.counts)),
            "HOROVOD_LOCAL_RANK": str(self.local),
            "HOROVOD_LOCAL_SIZE": str(self.counts[self.node]),
            "HOROVOD_CROSS_RANK": str(crossing.index(self.node)),
            "HOROVOD_CROSS_SIZE": str(len(crossing)),
        }


class Slurm(Environment):
    """A task of a step of SLURM; each counts as a host.

    Args:
        task: The task.
    """

    name: ClassVar[str] = "SLURM"
    is_quiet = True
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


def task_of(environ: Mapping[str, str] | None = None) -> Task | None:
    """Return the task that this process is; `None` outside of a step.

    Args:
        environ: Environment variables; by default those of this process.

    >>> step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    >>> own = {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    >>> ids = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    >>> task = task_of(step | own | ids)  # cyclic: one task on each node, then again
    >>> task.nodes, task.counts, task.position, task.port
    (('n1', 'n2'), (2, 2), 2, 20707)
    """
    environ = os.environ if environ is None else environ
    if _NODES not in environ or _COUNTS not in environ:
        return None
    if not all(environ.get(name, "").isdecimal() for name in _OWN):
        return None
    number, node, local, job, step = (int(environ[name]) for name in _OWN)
    nodes, counts = nodes_in(environ[_NODES]), counts_in(environ[_COUNTS])
    if len(nodes) != len(counts) or node >= len(nodes) or local >= counts[node]:
        return None
    return Task(number, node, local, job, step, nodes, counts)


def nodes_in(text: str) -> tuple[str, ...]:
    """Return the names in a list of nodes.

    >>> nodes_in("gpu[08-10,12],login1")
    ('gpu08', 'gpu09', 'gpu10', 'gpu12', 'login1')
    >>> nodes_in("r[1-2]n[1-2]")
    ('r1n1', 'r1n2', 'r2n1', 'r2n2')
    """
    found: list[str] = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", pattern):
            ends = _numbers(ranges) if ranges else [plain]
            names = [name + end for name in names for end in ends]
        found += names
    return tuple(found)


def counts_in(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each node.

    >>> counts_in("2(x3),1")
    (2, 2, 2, 1)
    """
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(count) for count, times in pairs for _ in range(int(times or 1)))


def can_meet(environ: Mapping[str, str]) -> bool:
    """Return whether tasks have a secret, without which they cannot meet."""
    return bool(environ.get("KERAS_DIST_SECRET"))


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of "08-10,12", with their zeros."""
    found = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        for number in range(int(first), int(last or first) + 1):
            found.append(str(number).zfill(len(first)))
    return found


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
