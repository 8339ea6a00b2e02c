"""Kubernetes: the pods of an Indexed Job, which know each other by a headless Service.

The controller sets `JOB_COMPLETION_INDEX`, and the pod's name is that of the job with
the index behind it; `subdomain`, the name of the Service, makes it known to the others.
How many pods there are is not in any variable: the manifest sets `PET_NNODES`. See
https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/.
"""

import socket
from collections.abc import Mapping
from typing import ClassVar, Self

from keras_dist.launch.environments.environment import Environment
from keras_dist.launch.hosts import host_range


class IndexedJob(Environment):
    """A pod of an Indexed Job of Kubernetes.

    Args:
        index: Its completion index.
        nnodes: How many pods there are, as `--nnodes` has it.
        own_name: The name of the pod with the Service's name behind it.
    """

    name: ClassVar[str] = "Kubernetes"

    def __init__(self, index: int, nnodes: str, own_name: str) -> None:
        self._index = index
        least, self._num_hosts = host_range(nnodes)
        self.min_hosts = None if least == self._num_hosts else least
        pod, _, domain = own_name.partition(".")
        job, _, last = pod.rpartition("-")
        if last != str(index) or not (job and domain):
            raise ValueError(
                "The pods of an Indexed Job meet at the first one's name, which needs "
                "a headless Service. Received: "
                f"JOB_COMPLETION_INDEX={index} in the pod {own_name}. Set `subdomain` "
                "of the pods to the name of the Service, or name the first pod by "
                "PET_MASTER_ADDR."
            )
        self._first_host = f"{job}-0.{domain}"

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        index, nnodes = environ.get("JOB_COMPLETION_INDEX"), environ.get("PET_NNODES")
        if not (index or "").isdecimal() or not nnodes:
            return None
        return cls(int(index or 0), nnodes, socket.getfqdn())

    @property
    def num_hosts(self) -> int:
        return self._num_hosts

    @property
    def host_number(self) -> int:
        return self._index

    @property
    def first_host(self) -> str:
        return self._first_host
