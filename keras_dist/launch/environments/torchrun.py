"""The variables of `torchrun`, by which Kubeflow's Trainer and others describe hosts.

`torchrun` reads each of its options from a variable, `PET_` and its name; scripts and
platforms also set them without the prefix. See
https://docs.pytorch.org/docs/stable/elastic/run.html, and Kubeflow Trainer's
`PET_NNODES`, `PET_NODE_RANK`, `PET_MASTER_ADDR`, `PET_MASTER_PORT`.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

from keras_dist.launch.environments.environment import Environment
from keras_dist.launch.hosts import host_range


class Torchrun(Environment):
    """A host of a job whose hosts are described by the variables of `torchrun`.

    Args:
        values: Its options, by their names without the prefix.
    """

    name: ClassVar[str] = "torchrun's variables"

    def __init__(self, values: Mapping[str, str]) -> None:
        least, self._num_hosts = host_range(values["NNODES"])
        self.min_hosts = None if least == self._num_hosts else least
        number = values.get("NODE_RANK", "")
        self._host_number = int(number) if number.isdecimal() else None
        address, _, port = values.get("RDZV_ENDPOINT", "").partition(":")
        self._first_host = values.get("MASTER_ADDR") or address
        port = values.get("MASTER_PORT") or port
        self.port = int(port) if port.isdecimal() else Environment.port
        count = values.get("NPROC_PER_NODE", "")  # or "auto", "gpu", "cpu"
        self.num_ranks = int(count) if count.isdecimal() else None

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the environment if hosts, and the place where they meet, are there.

        >>> own = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}
        >>> found = Torchrun.detect(own)
        >>> found.num_hosts, found.host_number, found.first_host, found.port
        (2, 1, 'a', 29400)
        >>> elastic = {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "a:29500"}
        >>> found = Torchrun.detect(elastic)
        >>> found.min_hosts, found.num_hosts, found.host_number, found.port
        (1, 4, None, 29500)
        """
        names = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES")
        plain = {name: environ[name] for name in names if name in environ}
        pet = {
            name.removeprefix("PET_"): value
            for name, value in environ.items()
            if name.startswith("PET_")
        }
        values = {**plain, **pet}
        has_number = "NODE_RANK" in values or "RDZV_ENDPOINT" in values
        has_place = "MASTER_ADDR" in values or "RDZV_ENDPOINT" in values
        is_whole = "NNODES" in values and has_number and has_place
        # In a process of `torchrun` itself the hosts are no longer to be started.
        return cls(values) if is_whole and "LOCAL_RANK" not in environ else None

    @property
    def num_hosts(self) -> int:
        return self._num_hosts

    @property
    def host_number(self) -> int | None:
        return self._host_number

    @property
    def first_host(self) -> str:
        return self._first_host
