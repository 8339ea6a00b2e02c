"""Start an agent on each host by ssh; the hosts are a list, or come from a script."""

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
from dataclasses import dataclass, field, replace

from keras_dist.launch import processes
from keras_dist.launch.agent import Header
from keras_dist.launch.coordinator import End, Plan, run_job
from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import (
    LOOPBACK,
    Member,
    hosts_of_lines,
    is_here,
    nnodes_text,
)
from keras_dist.launch.joined import JoinedHosts, Starter
from keras_dist.launch.network import EVERYWHERE, address_towards, own_address
from keras_dist.launch.output import Output
from keras_dist.launch.processes import stopped_by_signals
from keras_dist.launch.ranks import Command
from keras_dist.launch.startup_noise import VARIABLE as VERBOSE
from keras_dist.launch.store import Store

# Variables of this host or this login session, which are not passed to other hosts.
_NOT_PASSED_ON = re.compile(
    r"BASH_FUNC_.*|DISPLAY|HOME|HOSTNAME|LOGNAME|MAIL|OLDPWD|PWD|SHELL|SHLVL|SSH_.*"
    r"|TMPDIR|USER|XDG_.*|_"
)

# The exit code of ssh where it could not connect.
_NO_CONNECTION = 255

# Seconds between two attempts to connect to a host, and two looks for hosts; and for a
# script to answer.
_RETRY_SECONDS, _SCRIPT_SECONDS = 5.0, 30.0

# Seconds for which a start waits for a host that is being connected to; the second
# number if it did not answer before, as one without power.
_JOIN_SECONDS, _LOST_JOIN_SECONDS = 10.0, 3.0

# Seconds in which an agent has to end when it was told so, and for what it says last.
_END_SECONDS, _DRAIN_SECONDS = 3.0, 0.1

_CHUNK = 1 << 16


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


def run_by_ssh(command: Command, hosts: "NamedHosts", ssh: Ssh, plan: Plan) -> int:
    """Run a command on hosts that are reached by ssh.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        hosts: The hosts.
        ssh: How they are reached.
        plan: How many hosts are needed, and how often the job is started again.

    Returns:
        The exit code of the job; see `run_locally`.

    Raises:
        OSError, ValueError: If this host has no address for the others.
        RuntimeError: If Horovod is not installed.
        ValueError: If a number cannot be used.
    """
    if not 1 <= plan.least <= plan.num_hosts or plan.restarts < 0:
        raise ValueError(
            "At least one host is needed, and no negative number of restarts. "
            f"Received: --nnodes {nnodes_text(plan.min_hosts, plan.num_hosts)} "
            f"--restarts {plan.restarts}"
        )
    job, secret = secrets.token_hex(8), secrets.token_hex(16)
    # The reaper is forked, so before the first thread.
    with processes.reaper(job), stopped_by_signals() as stopped:
        hosts.start()
        address = _own_address(hosts, ssh, is_elastic=plan.is_elastic)
        with contextlib.closing(Store(address)) as store:
            header = Header(
                address=address,
                port=store.port,
                secret=secret,
                name="",
                host="",
                least=plan.least,
                most=plan.num_hosts,
                job=job,
                folder=os.getcwd(),
                command=_with_environment(command),
            )
            starter = SshHosts(hosts, ssh, header, is_elastic=plan.is_elastic)
            joined = JoinedHosts(store, secret, plan, starter=starter, stopped=stopped)
            try:
                return run_job(joined, plan).code
            finally:
                starter.end()


def _own_address(hosts: "NamedHosts", ssh: Ssh, *, is_elastic: bool) -> str:
    """Return the address at which the store listens."""
    others = [host for host in hosts.slots() if not is_here(host)]
    if ssh.address is None and not others:
        return EVERYWHERE if hosts.may_change else LOOPBACK
    try:
        return own_address(ssh.address, [*others, "localhost"][0])
    except ValueError:
        if not is_elastic or ssh.address is not None:
            raise
    return EVERYWHERE  # the name of a host may be known later


def _with_environment(command: Command) -> Command:
    variables = {
        name: value
        for name, value in os.environ.items()
        if not _NOT_PASSED_ON.fullmatch(name)
    }
    return replace(command, environment={**variables, **command.environment})


class NamedHosts:
    """The hosts that the user has named.

    Args:
        hosts: Name and slots of each.
    """

    may_change = False

    def __init__(self, hosts: Mapping[str, int]) -> None:
        self._hosts, self.error = dict(hosts), ""

    def start(self) -> None:
        """Begin to look for hosts."""

    def slots(self) -> dict[str, int]:
        """Return the slots of each host that is named now."""
        return self._hosts


class DiscoveredHosts(NamedHosts):
    """The hosts that a host discovery script names, as `horovodrun` has it.

    Args:
        script: The command. It prints a line `HOST:SLOTS` for each host that is there.
        num_ranks: Slots of a host whose line has none.
    """

    may_change = True

    def __init__(self, script: str, num_ranks: int | None) -> None:
        super().__init__({})
        self._script, self._num_ranks = script, num_ranks

    def start(self) -> None:
        """Run the script once, and from now on again and again."""
        self.look()
        threading.Thread(target=self._look_on, daemon=True).start()

    def look(self) -> None:
        """Run the script; if it fails, the hosts stay those of before."""
        try:
            hosts, error = hosts_of_lines(self._output(), self._num_ranks), ""
        except ValueError as problem:
            hosts, error = self._hosts, str(problem)
        if error and error != self.error:
            print_message(f"keras-dist: {error} The hosts stay those of before.")
        self._hosts, self.error = hosts, error

    def _look_on(self) -> None:
        while True:
            time.sleep(_RETRY_SECONDS)
            self.look()

    def _output(self) -> str:
        try:
            done = subprocess.run(
                shlex.split(self._script),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SCRIPT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"The host discovery script failed. {error}") from error
        if done.returncode:
            raise ValueError(
                f"The host discovery script failed. Received: {self._script} ended "
                f"with exit code {done.returncode}. {done.stderr.strip()[-200:]}"
            )
        return done.stdout


@dataclass
class _Agent:
    """An agent that this process has started, and the ssh that leads to it."""

    host: str
    process: "subprocess.Popen[bytes]"
    was_lost: bool  # the one before did not answer
    started: float = field(default_factory=time.monotonic)
    has_joined: bool = False
    is_shown: bool = False  # what it prints is passed on, or was

    @property
    def code(self) -> int | None:
        """Its exit code; 128 + the number of the signal that ended it."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def is_joining(self) -> bool:
        """True if it may soon join the job."""
        seconds = _LOST_JOIN_SECONDS if self.was_lost else _JOIN_SECONDS
        is_young = time.monotonic() - self.started < seconds
        return not self.has_joined and self.code is None and is_young


class SshHosts(Starter):
    """The agents of a job on the hosts that are named, by their ids.

    Args:
        hosts: The hosts.
        ssh: How they are reached.
        header: What each agent has to know, but for its name and host.
        is_elastic: Whether hosts come and go: then one that cannot be reached is tried
            again and again, and nothing is said of it.
    """

    def __init__(
        self, hosts: NamedHosts, ssh: Ssh, header: Header, *, is_elastic: bool
    ) -> None:
        self._hosts, self._ssh, self._header = hosts, ssh, header
        self._is_elastic = is_elastic
        self._agents: dict[str, _Agent] = {}
        self._output = Output(1, None, is_of_agents=True)  # they put the rank before
        self._count = 0
        self._lost: set[str] = set()  # hosts that did not answer
        self._said: dict[str, str] = {}  # what an agent that failed has printed
        self._tried: dict[str, float] = {}

    def look(self, joined: Collection[str], *, is_between_starts: bool) -> None:
        slots = self._hosts.slots()
        for name, agent in self._agents.items():
            if name in joined and not agent.has_joined:
                agent.has_joined = True
                self._lost.discard(agent.host)
            self._show(agent)
            if is_between_starts and agent.host not in slots:
                agent.process.kill()
        latest = {agent.host: agent for agent in self._agents.values()}
        for host in slots:
            last = latest.get(host)
            has_ended = last is not None and last.has_joined and last.code is not None
            if (is_between_starts and has_ended) or self._is_to_try(host, last):
                self._start(host)

    def _show(self, agent: _Agent) -> None:
        """Pass on what an agent prints, if it has joined, or the user waits for it."""
        process = agent.process
        if agent.is_shown:
            return
        if agent.has_joined or not self._is_elastic:
            agent.is_shown = True
            self._count += 1
            self._output.add(self._count, process.stdout, process.stderr)
        elif agent.code not in (None, _NO_CONNECTION):
            agent.is_shown = True
            assert process.stderr is not None
            os.set_blocking(process.stderr.fileno(), False)
            text = (process.stderr.read(_CHUNK) or b"").decode(errors="replace")
            text = f"{text}keras-dist: no ranks could be run on {agent.host}: exit code"
            text = f"{text} {agent.code}."
            if self._said.get(agent.host) != text:  # it is tried again and again
                self._said[agent.host] = text
                print_message(text)

    def _is_to_try(self, host: str, last: _Agent | None) -> bool:
        """Return whether to connect to a host that has no agent."""
        if last is not None and (last.code is None or not self._is_elastic):
            return False
        tried = self._tried.get(host)
        return tried is None or time.monotonic() - tried > _RETRY_SECONDS

    def _start(self, host: str) -> None:
        self._tried[host] = time.monotonic()
        name, address = secrets.token_hex(8), self._header.address
        if address == EVERYWHERE and is_here(host):
            address = LOOPBACK
        elif address == EVERYWHERE:
            try:
                address = address_towards(host)
            except ValueError:  # it may have a name later
                return
        process = subprocess.Popen(
            self._ssh.command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        # An id for each agent, which ends only its own ranks even if several agents run
        # on one machine.
        job = f"{self._header.job}_{name}"
        header = replace(self._header, name=name, host=host, address=address, job=job)
        # What does not fit into the pipe is taken only when ssh is connected.
        words = [process, header.line()]
        threading.Thread(target=_write, args=words, daemon=True).start()
        was_lost = host in self._lost
        for other, agent in list(self._agents.items()):
            if agent.host == host and not agent.has_joined:
                del self._agents[other]
                was_lost = True  # or each attempt would let a start wait as long
        self._agents[name] = _Agent(host, process, was_lost)

    def pause(self, seconds: float) -> None:
        self._output.pass_on_for(seconds)

    def ordered(
        self, members: Mapping[str, Member], plan: Plan, before: Sequence[str | None]
    ) -> list[str | None]:
        # Where hosts come and go, those of the last start are first: the first one's
        # first rank writes the checkpoints.
        place = {host: number for number, host in enumerate(self._hosts.slots())}
        named = sorted(members, key=lambda name: place.get(members[name].host, 0))
        if self._is_elastic:
            kept = [name for name in before if name in members]
            named = list(dict.fromkeys([*filter(None, kept), *named]))
        found: list[str | None] = [*named[: plan.num_hosts]]
        return found + [None] * (plan.num_hosts - len(found))

    def members(self, members: dict[str, Member]) -> dict[str, Member]:
        slots = self._hosts.slots()
        return {
            name: replace(member, num_ranks=slots[member.host])
            for name, member in members.items()
            if name in self._agents and member.host in slots
        }

    def failed(self) -> End | None:
        if self._is_elastic:
            return None
        for name, agent in self._agents.items():
            if agent.has_joined or agent.code is None:
                continue
            self.pause(_DRAIN_SECONDS)  # it has said more about it
            del self._agents[name]
            host, code = agent.host, agent.code
            return End(
                code or 1,
                f"keras-dist: no ranks could be run on {host}: exit code {code}.",
                is_host_lost=True,
                failed=host,
                why=f"host {host} was lost",
            )
        return None

    def ended(self) -> Mapping[str, int]:
        codes = {name: agent.code for name, agent in self._agents.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def waits(self) -> bool | None:
        agents = self._agents.values()
        if any(agent.is_joining for agent in agents):
            return True
        joined = {each.host for each in agents if each.has_joined and each.code is None}
        return None if set(self._hosts.slots()) - joined else False

    def changes(self, members: Mapping[str, Member]) -> list[str]:
        slots = self._hosts.slots()
        before = {member.host: member.num_ranks for member in members.values()}
        return [f"host {host} leaves" for host in before if host not in slots] + [
            f"host {host} has other slots"
            for host, count in before.items()
            if slots.get(host, count) != count
        ]

    def late_agents(self) -> dict[str, str]:
        agents = self._agents.items()
        is_late = {n: a.host for n, a in agents if not a.has_joined and a.code is None}
        return {} if self._is_elastic else is_late

    def named(self) -> tuple[Collection[str], str]:
        return self._hosts.slots(), self._hosts.error

    def lose(self, names: Collection[str]) -> None:
        for agent in (self._agents[name] for name in names if name in self._agents):
            if agent.code is None:
                self._lost.add(agent.host)
                agent.process.kill()
                agent.process.wait()

    def end(self) -> None:
        """End all agents, and pass on the rest of what they print."""
        begin = time.monotonic()
        while any(a.has_joined and a.code is None for a in self._agents.values()):
            self.pause(_DRAIN_SECONDS)
            if time.monotonic() - begin > _END_SECONDS:
                break
        for agent in self._agents.values():
            agent.process.kill()  # its reaper ends what is left
            agent.process.wait()
        self._output.close()


def _write(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which its exit code shows
        process.stdin.write(line)
        process.stdin.flush()
