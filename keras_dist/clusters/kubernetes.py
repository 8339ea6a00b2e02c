"""The pods of a Kubernetes Indexed Job."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import Cluster, Place, read_number

_INDEX = "JOB_COMPLETION_INDEX"
_SIZE, _MEETING = "KERAS_DIST_NNODES", "KERAS_DIST_RDZV"
_PORT = 29400


class IndexedJob(Cluster):
    """One rank in each pod; Kubernetes sets the index, the manifest the other two."""

    name: ClassVar[str] = "Kubernetes"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return _INDEX in environ and environ.get(_SIZE, "1") != "1"

    def place(self, environ: Mapping[str, str]) -> Place:
        address, _, port = environ.get(_MEETING, "").partition(":")
        if not address or not (port or "0").isdecimal():
            raise ValueError(
                "The manifest of an Indexed Job has to say where the pods meet. "
                f"Received: {_MEETING}={environ.get(_MEETING, 'nothing')}. Set it to "
                f"the name of the first pod and a port, as in train-0.train:{_PORT}."
            )
        return Place(
            launcher=self.name,
            rank=read_number(environ, _INDEX, self.name),
            size=read_number(environ, _SIZE, self.name),
            address=address,
            port=int(port or _PORT),
            variables=(_INDEX, _SIZE, _MEETING),
        )
