"""The variables by which a launcher with a rendezvous describes it to Horovod."""

from collections.abc import Mapping
from typing import ClassVar

from keras_dist.clusters.cluster import NumberVariables, name_numbers


class HorovodVariables(NumberVariables):
    """`keras-dist run`, `horovodrun` and `horovod.spark.run`."""

    name: ClassVar[str] = "horovodrun"
    variables = name_numbers("HOROVOD_{}")

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return self.variables[0] in environ  # one rank is a job, too
