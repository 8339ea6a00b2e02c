"""Hosts that a scheduler has started, as its variables describe them.

To support another scheduler, write a function that finds its variables, add it to
`_KINDS`, and test it by its variables.
"""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from signal import SIGUSR1

from keras_dist.launch.hosts import Place, host_count
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


def detect(environ: Mapping[str, str] | None = None) -> Place | None:
    """Return where this process meets other hosts; `None` if no scheduler names them.

    Args:
        environ: Environment variables; by default those of this process.

    Raises:
        ValueError: If its variables are there, and cannot be used.
    """
    environ = os.environ if environ is None else environ
    found = (kind(environ) for kind in _KINDS)
    return next((each for each in found if each is not None), None)


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


def slurm(environ: Mapping[str, str]) -> Place | None:
    """Return what SLURM says to a task of a step; each task counts as a host."""
    task = task_of(environ)
    if task is None:
        return None
    pairs = zip(task.nodes, task.counts, strict=True)
    return Place(
        address=address_of(task.nodes[0]),
        port=task.port,
        num_hosts=sum(task.counts),
        number=task.position,
        # A task that shares its node does not get all its GPUs.
        num_ranks=None if task.counts[task.node] == 1 else 1,
        host=task.nodes[task.node],
        names=[node for node, count in pairs for _ in range(count)],
        is_quiet=True,
        saved_code=SAVED,
        signals=(SIGUSR1,),
    )


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


def torchrun(environ: Mapping[str, str]) -> Place | None:
    """Return what variables of `torchrun` say, as Kubeflow's Trainer sets them.

    `torchrun` reads each of its options from a variable, `PET_` and its name; scripts
    and platforms also set them without the prefix. See
    https://docs.pytorch.org/docs/stable/elastic/run.html, and Kubeflow Trainer's
    `PET_NNODES`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, `PET_MASTER_PORT`.

    >>> own = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}
    >>> found = torchrun(own)
    >>> found.num_hosts, found.number, found.address, found.port
    (2, 1, 'a', 29400)
    >>> found = torchrun({"PET_NNODES": "4", "PET_RDZV_ENDPOINT": "a:29500"})
    >>> found.num_hosts, found.number, found.port
    (4, None, 29500)
    """
    names = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES")
    values = {name: environ[name] for name in names if name in environ}
    values |= {
        n.removeprefix("PET_"): v for n, v in environ.items() if n.startswith("PET_")
    }
    has_number = "NODE_RANK" in values or "RDZV_ENDPOINT" in values
    has_place = "MASTER_ADDR" in values or "RDZV_ENDPOINT" in values
    # In a process of `torchrun` itself the hosts are no longer to be started.
    if "LOCAL_RANK" in environ or not ("NNODES" in values and has_number and has_place):
        return None
    number, count = values.get("NODE_RANK", ""), values.get("NPROC_PER_NODE", "")
    address, _, port = values.get("RDZV_ENDPOINT", "").partition(":")
    port = values.get("MASTER_PORT") or port
    return Place(
        address=values.get("MASTER_ADDR") or address,
        port=int(port) if port.isdecimal() else Place.port,
        num_hosts=host_count(values["NNODES"], source="NNODES"),
        number=int(number) if number.isdecimal() else None,
        num_ranks=int(count) if count.isdecimal() else None,  # or "auto", "gpu", "cpu"
    )


def kubernetes(environ: Mapping[str, str]) -> Place | None:
    """Return what an Indexed Job of Kubernetes says to its pods.

    The controller sets `JOB_COMPLETION_INDEX`, and the pod's name is that of the job
    with the index behind it; `subdomain`, the name of a headless Service, makes it
    known to the others. How many pods there are is not in any variable: the manifest
    sets `PET_NNODES`. See
    https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/.
    """
    index, nnodes = environ.get("JOB_COMPLETION_INDEX", ""), environ.get("PET_NNODES")
    if not index.isdecimal() or not nnodes:
        return None
    own_name = socket.getfqdn()
    pod, _, domain = own_name.partition(".")
    job, _, last = pod.rpartition("-")
    if last != index or not (job and domain):
        raise ValueError(
            "The pods of an Indexed Job meet at the first one's name, which needs "
            "a headless Service. Received: "
            f"JOB_COMPLETION_INDEX={index} in the pod {own_name}. Set `subdomain` "
            "of the pods to the name of the Service, or name the first pod by "
            "PET_MASTER_ADDR."
        )
    return Place(
        address=f"{job}-0.{domain}",
        num_hosts=host_count(nnodes, source="PET_NNODES"),
        number=int(index),
    )


# The first one that finds its variables counts: of several, the innermost.
_KINDS = (slurm, torchrun, kubernetes)
