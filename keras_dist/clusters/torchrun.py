"""torchrun's variables, which Kubeflow's jobs and Accelerate set, too.

See https://docs.pytorch.org/docs/stable/elastic/run.html.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from keras_dist.clusters.cluster import Cluster, FourNumbers, Place, read_number

_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"


class Torchrun(FourNumbers):
    """`torchrun --nproc-per-node 2 script.py`, and what sets the same variables.

    torchrun's own store may listen at MASTER_PORT, so that the ranks meet at the next
    port.
    """

    name: ClassVar[str] = "torchrun"
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        has_size = "WORLD_SIZE" in environ or _ADDRESS in environ
        return super().is_here(environ) and has_size

    def place(self, environ: Mapping[str, str]) -> Place:
        place = super().place(environ)
        if not environ.get(_ADDRESS):
            raise ValueError(
                "torchrun has not said where the ranks meet. Received: "
                f"RANK={place.rank} and WORLD_SIZE={place.size} without {_ADDRESS}. "
                "Set it to the name of rank 0's host, or unset RANK to train on one "
                "process."
            )
        port = read_number(environ, _PORT, self.name) + 1
        variables = (*self.variables, _ADDRESS, _PORT)
        return replace(place, address=environ[_ADDRESS], port=port, variables=variables)


class TorchrunNodes(Cluster):
    """A host where torchrun, or `keras-dist run`, is to start the ranks.

    torchrun reads each of its options from a variable, `PET_` and its name, as
    Kubeflow Trainer sets them; others set them without the prefix.
    """

    name: ClassVar[str] = "torchrun's variables of hosts"
    variables: ClassVar[tuple[str, ...]] = ("NODE_RANK", "NNODES", _ADDRESS, _PORT)

    def is_here(self, environ: Mapping[str, str]) -> bool:
        own = _strip_prefix(environ)
        # In a process of torchrun the hosts are no longer to be started.
        is_rank = "LOCAL_RANK" in environ or own.get("NNODES") == "1"
        return not is_rank and {"NODE_RANK", "NNODES", _ADDRESS} <= own.keys()

    def place(self, environ: Mapping[str, str]) -> Place:
        own = _strip_prefix(environ)
        count = own.get("NPROC_PER_NODE", "")
        return Place(
            launcher=self.name,
            rank=read_number(own, "NODE_RANK", self.name),
            size=read_number(own, "NNODES", self.name),
            local_size=int(count) if count.isdecimal() else 1,  # or "auto", "gpu"
            address=own[_ADDRESS],
            port=read_number(own, _PORT, self.name) if _PORT in own else 29400,
            variables=self.variables,
        )


def _strip_prefix(environ: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in environ if name.startswith("PET_")}
    return {**environ, **{name[4:]: environ[name] for name in names}}
