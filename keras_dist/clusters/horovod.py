"""Horovod's own variables: `keras-dist run`, `horovodrun`, `horovod.spark.run`."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import Cluster, Place, read_number

_RANK, _SIZE = "HOROVOD_RANK", "HOROVOD_SIZE"
_LOCAL_RANK, _LOCAL_SIZE = "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"


class HorovodVariables(Cluster):
    """A launcher that has a rendezvous, and describes it to Horovod itself."""

    name: ClassVar[str] = "horovodrun"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return _RANK in environ

    def place(self, environ: Mapping[str, str]) -> Place:
        return Place(
            launcher=self.name,
            rank=read_number(environ, _RANK, self.name),
            size=read_number(environ, _SIZE, self.name),
            local_rank=int(environ.get(_LOCAL_RANK, 0)),
            local_size=int(environ.get(_LOCAL_SIZE, 1)),
            variables=(_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE),
        )
