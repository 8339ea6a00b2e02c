"""The pods of a Kubernetes Indexed Job."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import Cluster, Place, read_number, read_text

_INDEX = "JOB_COMPLETION_INDEX"
_SIZE, _MEETING = "KERAS_DIST_NNODES", "KERAS_DIST_RDZV"


class IndexedJob(Cluster):
    """One rank in each pod; Kubernetes sets the index, the manifest the other two."""

    name: ClassVar[str] = "Kubernetes"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return _INDEX in environ and environ.get(_SIZE, "1") != "1"

    def place(self, environ: Mapping[str, str]) -> Place:
        meeting = read_text(environ, _MEETING, self.name, r"[^:]+:\d+")
        address, _, port = meeting.partition(":")
        return Place(
            launcher=self.name,
            rank=read_number(environ, _INDEX, self.name),
            size=read_number(environ, _SIZE, self.name),
            address=address,
            port=int(port),
            variables=(_INDEX, _SIZE, _MEETING),
        )
