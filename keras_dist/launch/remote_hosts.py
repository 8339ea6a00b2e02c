"""Start an agent on each host of a job, pass on its output, and end it."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from keras_dist.launch.agent import SAVE, STOP, start_message
from keras_dist.launch.assignment import Assignment
from keras_dist.launch.failures import print_message
from keras_dist.launch.heartbeat import Presence
from keras_dist.launch.monitor.status_store import status_store_of
from keras_dist.launch.output import Output
from keras_dist.launch.ranks import Command
from keras_dist.launch.reach import Reach

_TICK = 0.1

# Seconds in which an agent must end its ranks and write its report; the second number
# if the ranks may save before.
_STOP_SECONDS, _SAVE_SECONDS = 15.0, 45.0

# Variables of this host or this login session, which are not passed to other hosts.
_NOT_PASSED_ON = re.compile(
    r"BASH_FUNC_.*|DISPLAY|HOME|HOSTNAME|LOGNAME|MAIL|OLDPWD|PWD|SHELL|SHLVL|SSH_.*"
    r"|TMPDIR|USER|XDG_.*|_"
)


class RemoteHosts:
    """The agents of a job, one on each host.

    Args:
        command: The command that the ranks run.
        planned: The assignment of each host.
        job: Id of the job.
        reach: How the other hosts are reached.
    """

    def __init__(
        self,
        command: Command,
        planned: Sequence[Assignment],
        job: str,
        reach: Reach,
    ) -> None:
        self.hosts = [assignment.slots[0].host for assignment in planned]
        self._planned, self._job, self._reach = planned, job, reach
        variables = {
            name: value
            for name, value in os.environ.items()
            if not _NOT_PASSED_ON.fullmatch(name)
        }
        environment = {**variables, **command.environment}
        self._command = replace(command, environment=environment)
        # The agents put the rank before each line.
        self._output = Output(1, None, is_of_agents=True)
        self._agents: list[subprocess.Popen[bytes]] = []
        store = status_store_of(planned[0].store)
        assert store is not None
        self.store = store
        self._presence = Presence[int](store)
        self._lost: list[int] = []
        self._sending: dict[int, threading.Thread] = {}

    def start(self) -> None:
        """Start the agents, and send each one its start message."""
        for number, assignment in enumerate(self._planned):
            agent = subprocess.Popen(
                self._reach.words(self.hosts[number]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._agents.append(agent)
            self._output.add(number, agent.stdout, agent.stderr)
            message = start_message(
                self._command,
                assignment,
                # An id for each agent, which ends only its own ranks even if several
                # agents run on one machine.
                job=f"{self._job}_{number}",
                launcher=self._reach.address,
            )
            self._send(number, message)

    def wait(self, stopped: Sequence[int], change: Callable[[], str] = str) -> str:
        """Wait until all agents have ended, or one has failed or is lost.

        Args:
            stopped: The wait ends as soon as this list is not empty.
            change: Or as soon as this returns why; not if an agent has ended already.

        Returns:
            Why, or an empty text if it has ended otherwise.
        """
        while not stopped and (running := self._running()):
            self._output.pass_on_for(_TICK)
            if any(agent.returncode for agent in self._agents):
                break
            self._presence.look(running)
            self._lost = self._presence.lost(running)
            if self._lost:
                break
            for number in self._presence.late(running):
                print_message(
                    f"keras-dist: {self.hosts[number]} has not answered yet; "
                    "still waiting for its agent."
                )
            if len(running) == len(self._agents) and (why := change()):
                return why
        return ""

    def end(self, *, is_saving: bool = False) -> dict[str, int]:
        """End all ranks and agents.

        Args:
            is_saving: Whether to give the ranks time to save a checkpoint.

        Returns:
            The exit codes of the agents that failed, by host.
        """
        for number in self._lost:
            self._agents[number].kill()
        for number in range(len(self._agents)):
            self._send(number, SAVE if is_saving else STOP)
        begin = time.monotonic()
        seconds = _SAVE_SECONDS if is_saving else _STOP_SECONDS
        while self._running():
            self._output.pass_on_for(_TICK)
            if time.monotonic() - begin > seconds:
                break
        for agent in self._agents:
            agent.kill()  # its reaper ends what is left
            agent.wait()
        self._output.close()
        codes = {h: a.returncode for h, a in zip(self.hosts, self._agents, strict=True)}
        return {host: code for host, code in codes.items() if code}

    @property
    def lost(self) -> list[int]:
        """The indices of the hosts that did not answer for 15 s."""
        return self._lost

    def has_run(self, number: int) -> bool:
        """Whether the agent of a host had come so far that it started ranks."""
        return self._presence.has_answered(number)

    def ranks_of(self, number: int) -> list[int]:
        """The ranks of a host, by its index."""
        return [slot.rank for slot in self._planned[number].slots]

    def _send(self, number: int, line: str) -> None:
        """Send a line to an agent, after those before, but wait for none of them.

        What does not fit into the pipe is taken only when ssh is connected.
        """
        before = self._sending.get(number)
        words = [self._agents[number], line, before]
        self._sending[number] = threading.Thread(target=_write, args=words, daemon=True)
        self._sending[number].start()

    def _running(self) -> list[int]:
        return [n for n, agent in enumerate(self._agents) if agent.poll() is None]


def _write(
    agent: subprocess.Popen[bytes], line: str, before: threading.Thread | None
) -> None:
    if before is not None:
        before.join()
    try:
        assert agent.stdin is not None
        agent.stdin.write(line.encode())
        agent.stdin.flush()
    except OSError:  # the agent has ended, which its exit code shows
        pass
