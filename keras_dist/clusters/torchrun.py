"""torchrun's variables, which Kubeflow's jobs and Accelerate set, too."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import Cluster, Place, read_number

_RANK, _SIZE = "RANK", "WORLD_SIZE"
_LOCAL_RANK, _LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"


class Torchrun(Cluster):
    """`torchrun --nproc-per-node 2 script.py`, and what sets the same variables.

    torchrun's own store may listen at MASTER_PORT, so that the ranks meet at the next
    port.
    """

    name: ClassVar[str] = "torchrun"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        has_size = _SIZE in environ or _ADDRESS in environ
        return _RANK in environ and has_size and environ.get(_SIZE) != "1"

    def place(self, environ: Mapping[str, str]) -> Place:
        if not environ.get(_ADDRESS):
            raise ValueError(
                "torchrun has not said where the ranks meet. Received: "
                f"{_RANK}={environ[_RANK]} and {_SIZE}={environ[_SIZE]} without "
                f"{_ADDRESS}. Set it to the name of rank 0's host, or unset {_RANK} to "
                "train on one process."
            )
        return Place(
            launcher=self.name,
            rank=read_number(environ, _RANK, self.name),
            size=read_number(environ, _SIZE, self.name),
            local_rank=int(environ.get(_LOCAL_RANK, 0)),
            local_size=int(environ.get(_LOCAL_SIZE, 1)),
            address=environ[_ADDRESS],
            port=read_number(environ, _PORT, self.name) + 1,
            variables=(_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _ADDRESS, _PORT),
        )
