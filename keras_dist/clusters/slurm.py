"""SLURM: each task of a step that `srun` started is a rank."""

import re
from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import Cluster, Place, read_number, read_text

# Of the step, and not of the job, which may be larger.
NUMBERS = _RANK, _SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
_LOCAL = "SLURM_LOCALID"
_NODES, _NODE = "SLURM_STEP_NODELIST", "SLURM_NODEID"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE"
_JOB, _STEP = "SLURM_JOB_ID", "SLURM_STEP_ID"

# Ports of the rendezvous. Steps of different jobs may begin on one host.
_FIRST_PORT, _NUM_PORTS, _APART = 20_000, 10_000, 101


class Slurm(Cluster):
    """A step of several tasks: `srun -N 2 --ntasks-per-node=2 python script.py`."""

    name: ClassVar[str] = "srun"
    key: ClassVar[str] = "slurm"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return _RANK in environ and environ.get(_SIZE, "1") not in ("0", "1")

    @staticmethod
    def has_one_task_per_node(environ: Mapping[str, str]) -> bool:
        """Return True if the step has one task on each node, as for other launchers."""
        return set(expand_counts(environ.get(_COUNTS, ""))) == {1}

    def place(self, environ: Mapping[str, str]) -> Place:
        names = (_JOB, _STEP, _NODE)
        job, step, node = (read_number(environ, name, self.name) for name in names)
        counts = expand_counts(read_text(environ, _COUNTS, self.name))
        return Place(
            launcher=self.name,
            rank=read_number(environ, _RANK, self.name),
            size=read_number(environ, _SIZE, self.name),
            local_rank=read_number(environ, _LOCAL, self.name),
            local_size=counts[node] if node < len(counts) else 0,
            address=find_first_node(read_text(environ, _NODES, self.name)),
            port=_FIRST_PORT + (job * _APART + step) % _NUM_PORTS,
            variables=(_RANK, _SIZE, _LOCAL, _NODE, _NODES, _COUNTS),
        )


def find_first_node(text: str) -> str:
    """Return the first name in a list of nodes; empty if there is none.

    >>> find_first_node("r[01-2,7]n[1-2],login1")
    'r01n1'
    """
    names = re.match(r"(?:[^,\[]|\[[^\]]*\])*", text)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", names[0] if names else "")


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks on each node.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]
