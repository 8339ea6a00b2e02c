"""How other hosts are reached by ssh."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from keras_dist.launch.hosts import LOOPBACK, is_here, own_address
from keras_dist.launch.startup_noise import VARIABLE


@dataclass(frozen=True)
class Reach:
    """How other hosts are reached.

    Args:
        ssh: The command and options of ssh; `--`, host and command line are
            added to it.
        address: Address of this host, by which the other hosts reach it.
        has_tls: Whether they reach the store by TLS.
    """

    ssh: Sequence[str]
    address: str
    has_tls: bool = False

    def words(self, host: str) -> list[str]:
        """The command that starts the agent of a host.

        Args:
            host: Its name; this host's agent is started without ssh.
        """
        agent = [sys.executable, "-m", "keras_dist", "host-agent"]
        if is_here(host):
            return agent
        # Nothing secret: all users can read the command lines of processes.
        found = [(name, os.environ.get(name)) for name in ("PYTHONPATH", VARIABLE)]
        variables = [f"{name}={value}" for name, value in found if value]
        # What stands behind `--` is no option, whatever a host is called.
        return [*self.ssh, "--", host, shlex.join(["env", *variables, *agent])]


@dataclass(frozen=True)
class HostLimits:
    """How many hosts a job has, and how they are reached.

    Args:
        least: How many hosts at least.
        most: How many hosts at most.
        ssh: The command and options of ssh.
        address: Address of this host for the others; `None` to find it by routing.
        timeout: Seconds to wait for enough hosts.
        has_tls: As of `Reach`.
    """

    least: int
    most: int
    ssh: Sequence[str]
    address: str | None
    timeout: float
    has_tls: bool = False

    def reach(self, hosts: Sequence[str]) -> Reach:
        """How these hosts are reached."""
        others = [host for host in hosts if not is_here(host)]
        if others or self.address is not None:
            address = own_address(self.address, [*others, *hosts][0])
        else:
            address = LOOPBACK
        return Reach(self.ssh, address, has_tls=self.has_tls)
