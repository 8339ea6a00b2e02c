"""SLURM: each task of a step that `srun` started is a rank."""

import re
from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import MEETING, Cluster, Place, read_number, read_text

# Of the step, and not of the job, which may be larger.
NUMBERS = _RANK, _SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
_NUM_NODES, _NODES = "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"
_JOB, _STEP = "SLURM_JOB_ID", "SLURM_STEP_ID"

# They describe this node also in a heterogeneous step (`srun -n1 : -n2`), which numbers
# its nodes in another order than SLURM_STEP_TASKS_PER_NODE has.
_LOCAL, _TASKS, _NODE = "SLURM_LOCALID", "SLURM_GTIDS", "SLURMD_NODENAME"

# The nodes of all components of such a step, and of each; the first one has rank 0.
_ALL, _COMPONENT = "SLURM_JOB_NODELIST", r"SLURM_JOB_NODELIST_(HET|PACK)_GROUP_\d+"

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
        return environ.get(_SIZE) == environ.get(_NUM_NODES)

    def place(self, environ: Mapping[str, str]) -> Place:
        names = (_JOB, _STEP, _RANK)
        job, step, rank = (read_number(environ, name, self.name) for name in names)
        nodes = read_text(environ, _NODES, self.name)
        parts = {k: v for k, v in environ.items() if re.fullmatch(_COMPONENT, k)}
        if environ.get(_ALL) not in parts.values():  # of which this step has several
            nodes = next((v for k, v in parts.items() if k.endswith("_0")), nodes)
        first = find_first_node(nodes)
        port = _FIRST_PORT + (job * _APART + step) % _NUM_PORTS
        if rank == 0 and environ.get(_NODE, first) != first and MEETING not in environ:
            raise ValueError(
                f"The other ranks look for rank 0 on {first}, the first node. "
                f"Received: {_NODE}={environ[_NODE]} on rank 0, and {_NODES}="
                f"{environ[_NODES]}, as srun has divided the tasks. Set its node and a "
                f"free port, before srun: export {MEETING}={environ[_NODE]}:{port}"
            )
        return Place(
            launcher=self.name,
            rank=rank,
            size=read_number(environ, _SIZE, self.name),
            local_rank=read_number(environ, _LOCAL, self.name),
            local_size=read_text(environ, _TASKS, self.name).count(",") + 1,
            address=first,
            port=port,
            variables=(_RANK, _SIZE, _LOCAL, _TASKS, _NODES),
        )


def find_first_node(text: str) -> str:
    """Return the first name in a list of nodes; empty if there is none.

    >>> find_first_node("r[01-2,7]n[1-2],login1")
    'r01n1'
    """
    names = re.match(r"(?:[^,\[]|\[[^\]]*\])*", text)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", names[0] if names else "")
