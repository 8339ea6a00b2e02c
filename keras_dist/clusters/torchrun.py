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

    def is_here(self, environ: Mapping[str, str]) -> bool:
        has_size = "WORLD_SIZE" in environ or _ADDRESS in environ
        return super().is_here(environ) and has_size

    def place(self, environ: Mapping[str, str]) -> Place:
        place = super().place(environ)
        if not environ.get(_ADDRESS):
            raise ValueError(
                f"torchrun has not said where the ranks meet. Received: "
                f"RANK={place.rank} and WORLD_SIZE={place.size} without {_ADDRESS}. "
                "Set it to the name of rank 0's host, or unset RANK to train on one "
                "process."
            )
        port = read_number(environ, _PORT, self.name) + 1
        variables = (*self.variables, _ADDRESS, _PORT)
        return replace(place, address=environ[_ADDRESS], port=port, variables=variables)
