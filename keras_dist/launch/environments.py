"""Hosts that a scheduler has started, as its variables describe them.

To support another scheduler, write a function that finds its variables, add it to
`_KINDS`, and test it by its variables.
"""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from signal import SIGUSR1

from keras_dist.clusters.slurm import Slurm, expand_counts, expand_nodes
from keras_dist.launch.hosts import Meeting, parse_host_count
from keras_dist.launch.processes import SAVED

# What `srun` sets for each task.
_NODES, _COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_NODE = "SLURM_NODEID"
_OF_STEP = (_NODES, _COUNTS, _NODE, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")

_SECONDS = 30.0


def detect(environ: Mapping[str, str] | None = None) -> Meeting | None:
    """Return where this process meets other hosts; `None` if no scheduler names them.

    Args:
        environ: Environment variables; by default those of this process.

    Raises:
        ValueError: If its variables are there, and cannot be used.
    """
    environ = os.environ if environ is None else environ
    found = (kind(environ) for kind in _KINDS)
    return next((each for each in found if each is not None), None)


def slurm(environ: Mapping[str, str]) -> Meeting | None:
    """Return what SLURM says to a task of a step; each task counts as a host."""
    if not all(name in environ for name in _OF_STEP):
        return None
    place, node = Slurm().place(environ), int(environ[_NODE])
    nodes, counts = expand_nodes(environ[_NODES]), expand_counts(environ[_COUNTS])
    return Meeting(
        address=address_of(place.address),
        port=place.port,
        num_hosts=place.size,
        # Counted node by node, however the tasks are distributed.
        number=sum(counts[:node]) + place.local_rank,
        # A task that shares its node does not get all its GPUs.
        num_ranks=None if place.local_size == 1 else 1,
        host=nodes[node],
        names=[n for n, count in zip(nodes, counts, strict=True) for _ in range(count)],
        is_quiet=True,
        saved_code=SAVED,
        signals=(SIGUSR1,),
    )


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


def torchrun(environ: Mapping[str, str]) -> Meeting | None:
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
    return Meeting(
        address=values.get("MASTER_ADDR") or address,
        port=int(port) if port.isdecimal() else Meeting.port,
        num_hosts=parse_host_count(values["NNODES"], source="NNODES"),
        number=int(number) if number.isdecimal() else None,
        num_ranks=int(count) if count.isdecimal() else None,  # or "auto", "gpu", "cpu"
    )


def kubernetes(environ: Mapping[str, str]) -> Meeting | None:
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
    return Meeting(
        address=f"{job}-0.{domain}",
        num_hosts=parse_host_count(nnodes, source="PET_NNODES"),
        number=int(index),
    )


# The first one that finds its variables counts: of several, the innermost.
_KINDS = (slurm, torchrun, kubernetes)
