"""torchrun's variables, which Kubeflow's jobs and Accelerate set, too.

See https://docs.pytorch.org/docs/stable/elastic/run.html.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from keras_dist.clusters.cluster import FourNumbers, Place, read_number

_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"


class Torchrun(FourNumbers):
    """`torchrun --nproc-per-node 2 script.py`, and what sets the same variables.

    torchrun's own store may listen at MASTER_PORT, so that the ranks meet at the next
    port.
    """

    name: ClassVar[str] = "torchrun"
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ports_away: ClassVar[int] = 1

    def is_here(self, environ: Mapping[str, str]) -> bool:
        has_size = "WORLD_SIZE" in environ or _ADDRESS in environ
        return super().is_here(environ) and has_size

    def place(self, environ: Mapping[str, str]) -> Place:
        place = super().place(environ)
        if not environ.get(_ADDRESS):
            raise ValueError(
                f"{self.name} has not said where the ranks meet. Received: "
                f"RANK={place.rank} and WORLD_SIZE={place.size} without {_ADDRESS}. "
                "Set it to the name of rank 0's host, or unset RANK to train on one "
                "process."
            )
        port = read_number(environ, _PORT, self.name) + self.ports_away
        variables = (*self.variables, _ADDRESS, _PORT)
        return replace(place, address=environ[_ADDRESS], port=port, variables=variables)


class TorchrunNodes(Torchrun):
    """A host on which torchrun, or `keras-dist run`, is to start the ranks.

    torchrun reads each of its options from a variable, `PET_` and its name, as
    Kubeflow Trainer sets them; others set them without the prefix.
    """

    name: ClassVar[str] = "the variables of torchrun"
    variables = ("NODE_RANK", "NNODES", "GROUP_RANK", "NPROC_PER_NODE")
    ports_away: ClassVar[int] = 0

    def is_here(self, environ: Mapping[str, str]) -> bool:
        own = _strip_prefix(environ)
        has_all = {"NODE_RANK", "NNODES", _ADDRESS} <= own.keys()
        # In a process of torchrun the hosts are no longer to be started.
        return has_all and own["NNODES"] != "1" and "LOCAL_RANK" not in environ

    def place(self, environ: Mapping[str, str]) -> Place:
        return super().place({_PORT: "29400", **_strip_prefix(environ)})


def _strip_prefix(environ: Mapping[str, str]) -> dict[str, str]:
    own = {n.removeprefix("PET_"): v for n, v in sorted(environ.items())}
    own.pop("GROUP_RANK", None)
    if not own.get("NPROC_PER_NODE", "").isdecimal():  # "auto", "gpu", "cpu"
        own.pop("NPROC_PER_NODE", None)
    return own
