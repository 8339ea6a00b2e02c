"""Flux: each task of a job is a rank."""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from keras_dist.clusters.cluster import MEETING, Place, read_meeting, read_number
from keras_dist.clusters.numbered import NumberVariables

_NODES, _JOB = "FLUX_JOB_NNODES", "FLUX_JOB_ID"


class Flux(NumberVariables):
    """`flux run -n 4 python script.py`; on several nodes, with `KERAS_DIST_RDZV`.

    The job has an identifier in digits and letters, from which the port follows.
    """

    name: ClassVar[str] = "flux run"
    key: ClassVar[str] = "flux"
    variables = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", _NODES)

    def place(self, environ: Mapping[str, str]) -> Place:
        place = super().place(environ)
        nodes = read_number(environ, _NODES, self.name)
        # The first ones have one more, if the tasks are not divided evenly.
        each, more = divmod(place.size, nodes)
        is_more = place.rank < more * (each + 1)
        place = replace(place, local_size=each + is_more)
        if nodes > 1 or environ.get(MEETING):
            return replace(place, **read_meeting(environ, self.name))
        port = 20_000 + zlib.crc32(environ.get(_JOB, "").encode()) % 10_000
        return replace(place, address="127.0.0.1", port=port)
