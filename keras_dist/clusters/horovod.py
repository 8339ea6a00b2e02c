"""Horovod's own variables: `keras-dist run`, `horovodrun`, `horovod.spark.run`."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import FourNumbers


class HorovodVariables(FourNumbers):
    """A launcher that has a rendezvous, and describes it to Horovod itself."""

    name: ClassVar[str] = "horovodrun"
    variables = (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    )

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return self.variables[0] in environ  # one rank is a job, too
