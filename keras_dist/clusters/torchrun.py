"""torchrun's variables, which Kubeflow's jobs and Accelerate set, too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from keras_dist.clusters.cluster import NumberVariables, Place, read_number, read_text


class Torchrun(NumberVariables):
    """`torchrun --nproc-per-node 2 script.py`, whose own store has MASTER_PORT."""

    name: ClassVar[str] = "torchrun"
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        has_size = "WORLD_SIZE" in environ or "MASTER_ADDR" in environ
        return super().is_here(environ) and has_size

    def place(self, environ: Mapping[str, str]) -> Place:
        place = super().place(environ)
        return replace(
            place,
            address=read_text(environ, "MASTER_ADDR", self.name),
            port=read_number(environ, "MASTER_PORT", self.name) + 1,
            variables=(*self.variables, "MASTER_ADDR", "MASTER_PORT"),
        )
