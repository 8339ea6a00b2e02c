"""The variables by which a launcher with a rendezvous describes it to Horovod."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import NumberVariables


class HorovodVariables(NumberVariables):
    """`keras-dist run`, `horovodrun` and `horovod.spark.run`."""

    name: ClassVar[str] = "horovodrun"
    variables = (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    )

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return self.variables[0] in environ  # one rank is a job, too
