"""The pods of a Kubernetes Indexed Job."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import (
    MEETING,
    Cluster,
    Place,
    read_meeting,
    read_number,
)

_INDEX, _SIZE = "JOB_COMPLETION_INDEX", "KERAS_DIST_NNODES"


class IndexedJob(Cluster):
    """One rank in each pod; Kubernetes sets the index, the manifest the other two."""

    name: ClassVar[str] = "Kubernetes"
    key: ClassVar[str] = "kubernetes"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return _INDEX in environ and environ.get(_SIZE, "1") != "1"

    def place(self, environ: Mapping[str, str]) -> Place:
        return Place(
            launcher=self.name,
            rank=read_number(environ, _INDEX, self.name),
            size=read_number(environ, _SIZE, self.name),
            variables=(_INDEX, _SIZE, MEETING),
            **read_meeting(environ, self.name),
        )
