"""The agents of several hosts, seen from the one on which the job was started."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from keras_dist.launch.agent import STOP, order
from keras_dist.launch.hosts import Slot, is_here
from keras_dist.launch.output import Output
from keras_dist.launch.ranks import Command
from keras_dist.launch.startup_noise import VARIABLE

_TICK = 0.1

# Seconds in which an agent ends its ranks, and says where they were.
_STOP_SECONDS = 15.0

# Variables that are about this host or this session, and mean nothing elsewhere.
_OWN = re.compile(
    r"BASH_FUNC_.*|DISPLAY|HOSTNAME|OLDPWD|PWD|SHLVL|SSH_.*|TMPDIR|XDG_.*|_"
)


@dataclass(frozen=True)
class Reach:
    """How other hosts are reached.

    Args:
        ssh: A command that runs its last argument on the host named before it.
        address: Of this host, by which the others reach it.
    """

    ssh: Sequence[str]
    address: str


class RemoteHosts:
    """One agent for each host.

    Args:
        command: What the ranks run.
        slots: Of all ranks.
        job: Number of the job.
        reach: How other hosts are reached.
    """

    def __init__(
        self, command: Command, slots: Sequence[Slot], job: str, reach: Reach
    ) -> None:
        self.hosts = list(dict.fromkeys(slot.host for slot in slots))
        self.num_ranks = len(slots)
        self._slots, self._job, self._reach = slots, job, reach
        own = {k: v for k, v in os.environ.items() if not _OWN.fullmatch(k)}
        self._command = replace(command, environment={**own, **command.environment})
        self._output = Output(1, None)  # the agents put ranks before the lines
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the agents, and tell them which ranks to run."""
        for number, host in enumerate(self.hosts):
            agent = subprocess.Popen(
                self._words(host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._agents.append(agent)
            self._output.add(number, agent.stdout, agent.stderr)
            message = order(
                self._command,
                [slot for slot in self._slots if slot.host == host],
                # Each agent ends its own, also where several are on one machine.
                job=f"{self._job}_{number}",
                towards=self._reach.address,
                number=number,
            )
            _say(agent, message)

    def wait(self, stopped: Sequence[int]) -> None:
        """Wait until all agents have ended, or one has failed."""
        while not stopped and any(agent.poll() is None for agent in self._agents):
            self._output.pass_on(_TICK)
            if any(agent.poll() for agent in self._agents):
                break

    def end(self) -> dict[str, int]:
        """End all ranks and agents; the exit codes of agents that have failed."""
        for agent in self._agents:
            _say(agent, STOP)
        begin = time.monotonic()
        while any(agent.poll() is None for agent in self._agents):
            self._output.pass_on(_TICK)
            if time.monotonic() - begin > _STOP_SECONDS:
                break
        for agent in self._agents:
            agent.kill()  # its warden ends what is left
            agent.wait()
        self._output.close()
        codes = {h: a.returncode for h, a in zip(self.hosts, self._agents, strict=True)}
        return {host: code for host, code in codes.items() if code}

    def _words(self, host: str) -> list[str]:
        agent = [sys.executable, "-m", "keras_dist", "host-agent"]
        if is_here(host):
            return agent
        # Nothing secret: command lines are for all to read.
        found = [(name, os.environ.get(name)) for name in ("PYTHONPATH", VARIABLE)]
        variables = [f"{name}={value}" for name, value in found if value]
        return [*self._reach.ssh, host, shlex.join(["env", *variables, *agent])]


def _say(agent: subprocess.Popen[bytes], words: str) -> None:
    try:
        assert agent.stdin is not None
        agent.stdin.write(words.encode())
        agent.stdin.flush()
    except OSError:  # it has ended, and its exit code says so
        pass
