"""SLURM: each task of a step that `srun` started is a rank."""

import re
from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import Cluster, Place, read_number

# Of the step, and not of the job, which may be larger.
_RANK, _SIZE, _LOCAL = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
_NODES, _NODE = "SLURM_STEP_NODELIST", "SLURM_NODEID"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE"
_JOB, _STEP = "SLURM_JOB_ID", "SLURM_STEP_ID"

# Ports of the rendezvous. Steps of different jobs may begin on one host.
_FIRST_PORT, _NUM_PORTS, _APART = 20_000, 10_000, 101


class Slurm(Cluster):
    """A step of several tasks: `srun -N 2 --ntasks-per-node=2 python script.py`."""

    name: ClassVar[str] = "srun"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return _RANK in environ and environ.get(_SIZE, "1") not in ("0", "1")

    @staticmethod
    def has_one_task_per_node(environ: Mapping[str, str]) -> bool:
        """Return True if the step has one task on each node, as for other launchers."""
        return set(expand_counts(environ.get(_COUNTS, ""))) == {1}

    def place(self, environ: Mapping[str, str]) -> Place:
        counts = expand_counts(environ.get(_COUNTS, ""))
        node, nodes = environ.get(_NODE, ""), expand_nodes(environ.get(_NODES, ""))
        if not (nodes and node.isdecimal() and int(node) < len(counts)):
            raise ValueError(
                "srun has not said which nodes its step has. Received: "
                f"{_NODES}={environ.get(_NODES)}, {_COUNTS}={environ.get(_COUNTS)}, "
                f"{_NODE}={environ.get(_NODE)}. Unset SLURM_PROCID to train on one "
                "process."
            )
        job, step = (read_number(environ, name, self.name) for name in (_JOB, _STEP))
        return Place(
            launcher=self.name,
            rank=read_number(environ, _RANK, self.name),
            size=read_number(environ, _SIZE, self.name),
            local_rank=read_number(environ, _LOCAL, self.name),
            local_size=counts[int(node)],
            address=nodes[0],
            port=_FIRST_PORT + (job * _APART + step) % _NUM_PORTS,
            variables=(_RANK, _SIZE, _LOCAL, _NODES, _COUNTS),
        )


def expand_nodes(text: str) -> list[str]:
    """Return the names in a list of nodes.

    >>> expand_nodes("gpu[08-10,12],login1")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login1']
    >>> expand_nodes("r[1-2]n[1-2]")
    ['r1n1', 'r1n2', 'r2n1', 'r2n2']
    """
    nodes: list[str] = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", pattern):
            ends = _expand_ranges(ranges) if ranges else [plain]
            names = [name + end for name in names for end in ends]
        nodes += names
    return nodes


def _expand_ranges(ranges: str) -> list[str]:
    numbers = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        for number in range(int(first), int(last or first) + 1):
            numbers.append(str(number).zfill(len(first)))
    return numbers


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks on each node.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]
