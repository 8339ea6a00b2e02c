"""The agent of a host: joins the store of a job, and does what the first host orders.

With `--rdzv`, `keras-dist run` is itself the agent; by ssh it starts `host-agent`,
which gets a line of JSON on standard input. The end of the input means that the
launcher is gone.
"""

import dataclasses
import io
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_dist.launch import horovod_library, processes
from keras_dist.launch.failures import LOST_SECONDS, Report, print_message
from keras_dist.launch.hosts import Member, Slot, assign_slots
from keras_dist.launch.network import check_own_name, check_reach
from keras_dist.launch.processes import ORDERED, stopped_by_signals
from keras_dist.launch.ranks import Assignment, Command, run_ranks
from keras_dist.launch.store import JOB, StoreClient, secret_of_start, variables_of
from keras_dist.version import __version__

# Seconds between two looks at orders and signals, between two heartbeats, and between
# two attempts to read the first order.
_LOOK_SECONDS, _BEAT_SECONDS, _WAIT_SECONDS = 0.1, 1.0, 0.2

# A longer time between two heartbeats means that this host was suspended.
_LONGEST_BEAT = LOST_SECONDS + 5.0

# Seconds in which an agent that was started by the launcher has to reach the store.
_JOIN_SECONDS = 60.0


class Agent:
    """A host that takes part in a job whose store is in another process.

    Args:
        store: The store of the job, as this host reaches it.
        secret: Secret of the job.
        member: This host.
        num_hosts: How many hosts the job has.
        stopped: Numbers of the signals that this process has received.
        name: Id of this host; by default a random one.
        is_quiet: Whether the first host prints to the same screen.
    """

    def __init__(
        self,
        store: StoreClient,
        secret: str,
        member: Member,
        *,
        num_hosts: int,
        stopped: list[int],
        name: str = "",
        is_quiet: bool = False,
    ) -> None:
        self.name = name or secrets.token_hex(8)
        self._store, self._secret, self._member = store, secret, member
        self._num_hosts, self._stopped = num_hosts, stopped
        self._is_quiet = is_quiet
        # Addresses of this host, and of the first one as it is reached from here.
        self._address = self._reached = ""
        self._nonce = ""  # of the job
        # What all hosts have to do now; empty for nothing.
        self._order: Mapping[str, Any] = {}
        # Why no more orders come; empty if they do.
        self._gone = ""

    def join(self, timeout: float) -> bool:
        """Join the job; return `False` if a signal stopped this process first.

        Args:
            timeout: Seconds to wait for the store.

        Raises:
            ValueError: If the store cannot be reached, refuses the secret, or has a job
                of another kind.
        """
        found = self._store.wait(
            self._member.host, timeout=timeout, stopped=self._stopped
        )
        if found is None:
            return False
        self._address, self._reached = found
        job = self._store.get(JOB) or {}
        self._nonce = job.get("nonce", "")
        if (job.get("num_hosts"), job.get("version")) != (self._num_hosts, __version__):
            raise ValueError(
                "The hosts of a job have to agree on `--nnodes` and on the version of "
                f"keras_dist. Received: {self._num_hosts} and {__version__} here, "
                f"{job.get('num_hosts')} and {job.get('version')} on the first host."
            )
        member = dataclasses.replace(self._member, reached=self._reached)
        self._store.put_surely(f"join.{self.name}", dataclasses.asdict(member))
        threading.Thread(target=self._keep_in_touch, daemon=True).start()
        return True

    def _keep_in_touch(self) -> None:
        """In a thread: send heartbeats, and read what the first host orders."""
        last, beats = time.monotonic(), 0
        while not self._gone and self._order.get("do") != "exit":
            begin, beats = time.monotonic(), beats + 1
            if begin - last > _LONGEST_BEAT:
                last = begin
            if self._store.put(f"beat.{self.name}", beats):
                last = time.monotonic()
                self._read_order()
            elif time.monotonic() - last > LOST_SECONDS:
                self._gone = (
                    "The first host was lost, and the job ends with it. Received: no "
                    f"answer from {self._meeting} for {LOST_SECONDS:g} s. Start the "
                    "same command on all hosts again; with `resume=` it goes on."
                )
            time.sleep(_BEAT_SECONDS if self._order else _WAIT_SECONDS)

    def _read_order(self) -> None:
        order = self._store.get("order")
        of = order or self._store.get(JOB) or {}
        if of.get("nonce", self._nonce) != self._nonce:
            self._gone = (
                "The command of the first host was started again, and the job that it "
                f"had before has ended. Received: another job at {self._meeting}. "
                "Start the same command here again; with `resume=` it goes on."
            )
        elif order is not None:
            self._order = order

    @property
    def _meeting(self) -> str:
        return f"{self._store.address}:{self._store.port}"

    def cut(self) -> None:
        """End the ranks, and follow no more orders: what has started it is gone."""
        self._gone = "The launcher is gone."

    def follow(self, command: Command, job: str) -> int:
        """Do what the first host orders, to the end of the job.

        Args:
            command: The command that the ranks run.
            job: Id of the processes that this host starts.

        Returns:
            The exit code of the job.

        Raises:
            ValueError: If the first host is lost, or has no use for this host.
        """
        last = -1
        while not self._gone:
            order = self._order
            if order.get("do") == "exit":
                if order["text"] and not self._is_quiet:
                    print_message(order["text"])
                self._leave()
                return int(order["code"])
            if order and order["start"] != last:
                last = order["start"]
                # Another host may have failed before this one has seen the start.
                is_run = order["do"] == "run"
                report = self._run(order, command, job) if is_run else Report()
                name = f"report.{last}.{self.name}"
                self._store.put_surely(name, report.values())
            self._forward_stop()
            if self._stopped and last < 0:
                self._leave()
                return 128 + self._stopped[0]  # nobody waits for this host
            time.sleep(_LOOK_SECONDS)
        raise ValueError(self._gone)

    def _leave(self) -> None:
        self._store.put(f"left.{self.name}", True)

    def _run(self, order: Mapping[str, Any], command: Command, job: str) -> Report:
        """Run this host's ranks to their end, or until an order ends them."""
        own = self._address
        if own.startswith("127."):
            own = order["reached"]  # as the others see this host
        secret = secret_of_start(self._secret, self._nonce, order["start"])
        assignment = Assignment(
            slots=self._slots(order["hosts"]),
            store=variables_of(self._reached, self._store.port, secret),
            secret=secret,
            restart=order["start"],
            seed=order["seed"],
            has_peers=True,
        )
        stops: list[int] = []
        is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=[stops, is_over], daemon=True)
        watch.start()
        try:
            return run_with_peers(command, assignment, job, address=own, stopped=stops)
        finally:
            is_over.set()
            watch.join()

    def _slots(self, hosts: Sequence[tuple[str, str, int]]) -> Sequence[Slot]:
        """Return the slots of this host.

        Args:
            hosts: Id, name and number of ranks of each host, by their numbers.

        Raises:
            ValueError: If this host is not one of them.
        """
        names = [name for name, _, _ in hosts]
        if self.name not in names:
            raise ValueError(
                "The job has all its hosts. Received: one more, "
                f"{self._member.host}, which is not needed."
            )
        members = [Member(host, num_ranks) for _, host, num_ranks in hosts]
        return assign_slots(members)[names.index(self.name)]

    def _watch(self, stops: list[int], is_over: threading.Event) -> None:
        """Stop the ranks at an order, a signal, or when the first host is gone."""
        while not (stops or is_over.wait(_LOOK_SECONDS)):
            self._forward_stop()
            if self._stopped:
                stops.append(self._stopped[0])
            elif self._order["do"] == "save":
                stops.append(signal.SIGTERM)
            elif self._order["do"] != "run" or self._gone:
                stops.append(ORDERED)

    def _forward_stop(self) -> None:
        """Let the first host know of a signal, which ends the job on all hosts."""
        if self._stopped:
            self._store.put(f"stopped.{self.name}", self._stopped[0])


def run_with_peers(
    command: Command,
    assignment: Assignment,
    job: str,
    *,
    address: str,
    stopped: Sequence[int],
) -> Report:
    """Run this host's ranks of a job on several hosts; errors are reported.

    Args:
        command, assignment, job, address, stopped: See `run_ranks`.
    """
    try:
        if not horovod_library.uses_named_network():
            check_own_name(address)
        return run_ranks(command, assignment, job, address=address, stopped=stopped)
    except (OSError, RuntimeError, ValueError) as error:
        return Report(error=str(error))


@dataclasses.dataclass(frozen=True)
class Header:
    """What the agent of a host has to know, which ssh brings on standard input.

    Args:
        address: Address of the launcher's host.
        port: Port of its store.
        secret: Secret of the job.
        job: Id of the agent's processes.
        folder: The folder in which the ranks run.
        command: The command that they run.
        name: Id of the agent.
        host: Name of its host, as the user has named it.
        number: Number of the host.
        num_ranks: Number of ranks of the host.
        num_hosts: Number of hosts.
    """

    address: str
    port: int
    secret: str
    job: str
    folder: str
    command: Command
    name: str = ""
    host: str = ""
    number: int = 0
    num_ranks: int = 0
    num_hosts: int = 0

    def line(self) -> bytes:
        """Return the header as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


def header_of(line: bytes) -> Header:
    """Parse what `Header.line` has made.

    Raises:
        ValueError: If it is something else.
    """
    try:
        values = json.loads(line)
        header = Header(**{**values, "command": Command(**values["command"])})
        kinds = {field.name: field.type for field in dataclasses.fields(Header)}
        is_whole = all(
            type(getattr(header, name)) is kind for name, kind in kinds.items()
        )
        texts = (each for each in vars(header).values() if isinstance(each, str))
        is_whole &= not any("\0" in text for text in texts)
        is_whole &= bool(header.address and header.secret and header.name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            "The agent of a host is started by `keras-dist run -H`, which sends it a "
            f"message. Received: {line[:50]!r}. The versions of keras_dist on the "
            "hosts have to be the same."
        )
    return header


def serve() -> int:
    """Read a header from standard input, and take part in the job to its end.

    Returns:
        The exit code of the job.
    """
    # Without a buffer, whose lock a waiting thread would hold when Python ends.
    lines = io.FileIO(0, closefd=False)
    header = header_of(lines.readline())
    try:
        os.chdir(header.folder)
    except OSError as error:
        raise ValueError(
            "The folder in which the job was started is needed on each host. "
            f"Received: {error}, on {socket.gethostname()}."
        ) from error
    check_reach(header.address, header.port)
    with processes.reaper(header.job), stopped_by_signals() as stopped:
        agent = Agent(
            StoreClient(header.address, header.port, header.secret),
            header.secret,
            Member(header.host, header.num_ranks, header.number),
            num_hosts=header.num_hosts,
            stopped=stopped,
            name=header.name,
            is_quiet=True,
        )
        # After the fork of the reaper, which must come before the first thread.
        threading.Thread(
            target=_wait_for_end, args=[lines, agent.cut], daemon=True
        ).start()
        if not agent.join(_JOIN_SECONDS):
            return 128 + stopped[0]
        return agent.follow(header.command, header.job)


def _wait_for_end(lines: io.RawIOBase | io.BytesIO, cut: Callable[[], None]) -> None:
    while lines.readline():  # the launcher sends no more lines
        pass
    cut()
