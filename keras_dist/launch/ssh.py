"""Start an agent on each of several hosts by ssh."""

import contextlib
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from keras_dist.launch.agent import Header
from keras_dist.launch.hosts import is_here
from keras_dist.launch.output import Output
from keras_dist.launch.ranks import Command
from keras_dist.launch.startup_noise import VARIABLE as VERBOSE

# Variables of this host or this login session, which are not passed to other hosts.
_NOT_PASSED_ON = re.compile(
    r"BASH_FUNC_.*|DISPLAY|HOME|HOSTNAME|LOGNAME|MAIL|OLDPWD|PWD|SHELL|SHLVL|SSH_.*"
    r"|TMPDIR|USER|XDG_.*|_"
)

# Seconds in which an agent has to end when it was told so, and for what it says last.
_END_SECONDS, _DRAIN_SECONDS = 3.0, 0.1


@dataclass(frozen=True)
class Ssh:
    """How other hosts are reached.

    Args:
        words: The command and options of ssh; `--`, host and command line are added.
        address: Address of this host for the others; `None` to find it by routing.
    """

    words: Sequence[str]
    address: str | None = None

    def command(self, host: str) -> list[str]:
        """Return the command that starts the agent of a host, here without ssh."""
        agent = [sys.executable, "-m", "keras_dist", "host-agent"]
        if is_here(host):
            return agent
        # Nothing secret: all users can read the command lines of processes.
        found = [(name, os.environ.get(name)) for name in ("PYTHONPATH", VERBOSE)]
        variables = [f"{name}={value}" for name, value in found if value]
        # What stands behind `--` is no option, whatever a host is called.
        return [*self.words, "--", host, shlex.join(["env", *variables, *agent])]


class SshHosts:
    """The agents of a job on the hosts that the user has named, by their ids.

    Args:
        hosts: The hosts, and the number of ranks of each.
        ssh: How they are reached.
        header: What each agent has to know, but for its host.
    """

    def __init__(self, hosts: Mapping[str, int], ssh: Ssh, header: Header) -> None:
        self._output = Output(is_of_agents=True)
        self._hosts: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for number, (host, num_ranks) in enumerate(hosts.items()):
            name = secrets.token_hex(8)
            process = subprocess.Popen(
                ssh.command(host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._hosts[name], self._processes[name] = host, process
            self._output.add(number, process.stdout, process.stderr)
            # An id for each agent, which ends only its own ranks even if several agents
            # run on one machine.
            own = replace(
                header,
                name=name,
                host=host,
                number=number,
                num_ranks=num_ranks,
                num_hosts=len(hosts),
                job=f"{header.job}_{name}",
            )
            # What does not fit into the pipe is taken only when ssh is connected.
            words = [process, own.line()]
            threading.Thread(target=_write, args=words, daemon=True).start()

    def pass_on_for(self, seconds: float) -> None:
        """Wait for so long, and pass on what the agents print."""
        self._output.pass_on_for(seconds)

    def running(self) -> dict[str, str]:
        """Return the hosts of agents that run."""
        ended = self.ended()
        return {name: host for name, host in self._hosts.items() if name not in ended}

    def ended(self) -> dict[str, int]:
        """Return the exit codes of agents that have ended: 128 + n after a signal."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        return {
            name: code if code >= 0 else 128 - code
            for name, code in codes.items()
            if code is not None
        }

    def failed(self, joined: Collection[str]) -> tuple[str, int] | None:
        """Return host and exit code of an agent that has ended before it joined."""
        for name, code in self.ended().items():
            if name not in joined:
                self.pass_on_for(_DRAIN_SECONDS)  # it has said more about it
                return self._hosts[name], code
        return None

    def lose(self, names: Collection[str]) -> None:
        """End the agents that do not answer any more."""
        for name in names:
            self._processes[name].kill()
            self._processes[name].wait()

    def close(self) -> None:
        """End all agents, and pass on the rest of what they print."""
        begin = time.monotonic()
        while self.running() and time.monotonic() - begin < _END_SECONDS:
            self.pass_on_for(_DRAIN_SECONDS)
        for process in self._processes.values():
            process.kill()  # its reaper ends what is left
            process.wait()
        self._output.close()


def with_environment(command: Command) -> Command:
    """Return a command with the variables of this process, for other hosts."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not _NOT_PASSED_ON.fullmatch(name)
    }
    return replace(command, environment={**variables, **command.environment})


def _write(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which its exit code shows
        process.stdin.write(line)
        process.stdin.flush()
