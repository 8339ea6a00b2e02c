"""SkyPilot: the `run` command of a task with `num_nodes`, which runs on each of them.

See https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

from keras_dist.launch.environments.environment import Environment


class SkyPilot(Environment):
    """A node of a task of SkyPilot.

    Args:
        number: Number of the node.
        addresses: Addresses of all nodes.
        num_gpus: GPUs of each node.
    """

    name: ClassVar[str] = "SkyPilot"

    def __init__(self, number: int, addresses: list[str], num_gpus: int) -> None:
        self._number, self._addresses = number, addresses
        self.num_ranks = num_gpus or None

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the environment if its variables are there.

        >>> addresses = {"SKYPILOT_NODE_IPS": "10.0.0.1\\n10.0.0.2"}
        >>> found = SkyPilot.detect({"SKYPILOT_NODE_RANK": "1", **addresses})
        >>> found.num_hosts, found.host_number, found.first_host
        (2, 1, '10.0.0.1')
        """
        number = environ.get("SKYPILOT_NODE_RANK", "")
        addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
        if not number.isdecimal() or not addresses:
            return None
        gpus = environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "")
        return cls(int(number), addresses, int(gpus) if gpus.isdecimal() else 0)

    @property
    def num_hosts(self) -> int:
        return len(self._addresses)

    @property
    def host_number(self) -> int:
        return self._number

    @property
    def first_host(self) -> str:
        return self._addresses[0]
