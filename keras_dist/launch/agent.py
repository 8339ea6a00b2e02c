"""The agent of a host: joins the store of a job, and does what the coordinator orders.

With `--rdzv`, `keras-dist run` is itself the agent; by ssh it starts `host-agent`,
which gets a line of JSON on standard input. The end of the input means that the
launcher is gone.
"""

import dataclasses
import io
import json
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from keras_dist.launch import horovod_library, processes
from keras_dist.launch.failures import LOST_SECONDS, Report, print_message
from keras_dist.launch.hosts import Member, Slot
from keras_dist.launch.network import check_own_name, check_reach
from keras_dist.launch.processes import stopped_by_signals
from keras_dist.launch.ranks import Assignment, Command, run_ranks
from keras_dist.launch.store import NONCE, StoreClient, secret_of_start, variables_of
from keras_dist.version import __version__

# Seconds between two looks at what has come from the coordinator, and at signals; and
# for which this host waits for its start beyond the time that the first one has.
_LOOK_SECONDS, _MORE_SECONDS = 0.1, 15.0

# Seconds between two heartbeats; between two looks at the clock more means that this
# host was suspended.
_BEAT_SECONDS, _LONGEST_LOOK = 1.0, 5.0

# Seconds in which an agent that was started by the launcher has to reach the store.
JOIN_SECONDS = 60.0


class Heartbeat(threading.Thread):
    """In an agent: writes heartbeats to the store.

    Args:
        store: The store of the job.
        name: Id of the agent.
        on_lost: Called once if the store was out of reach for 15 s.
    """

    def __init__(
        self, store: StoreClient, name: str, on_lost: Callable[[], None]
    ) -> None:
        super().__init__(name="keras_dist.heartbeat", daemon=True)
        self._store, self._host, self._on_lost = store, name, on_lost

    def run(self) -> None:
        last, beats = time.monotonic(), 0
        while True:
            begin, beats = time.monotonic(), beats + 1
            if begin - last > LOST_SECONDS + _LONGEST_LOOK:
                last = begin  # this host was suspended
            if self._store.put(f"beat.{self._host}", beats):
                last = time.monotonic()
            elif time.monotonic() - last > LOST_SECONDS:
                self._on_lost()
                return
            time.sleep(_BEAT_SECONDS)


class Agent:
    """A host that takes part in a job.

    Args:
        store: The store of the job, as this host reaches it.
        secret: Secret of the job.
        member: This host.
        is_first: Whether the store runs in this process.
        timeout: Seconds to wait for the first start; but not where hosts come and go.
        stopped: Numbers of the signals that this process has received.
        name: Id of this agent; by default a random one.
    """

    def __init__(
        self,
        store: StoreClient,
        secret: str,
        member: Member,
        *,
        is_first: bool,
        timeout: float,
        stopped: list[int],
        name: str = "",
    ) -> None:
        self.name = name or secrets.token_hex(8)
        self._store, self._secret, self._member = store, secret, member
        self._is_first, self._timeout, self._stopped = is_first, timeout, stopped
        # Addresses of this host, and of the first one as it is reached from here.
        self._address = self._reached = ""
        self._nonce: str | None = None
        # Whether no more orders come: the store is gone, has another job, or the
        # launcher has closed the connection.
        self._is_lost, self._is_replaced = threading.Event(), threading.Event()
        self._is_cut = threading.Event()
        # What the coordinator orders now; empty for nothing.
        self._order: Mapping[str, Any] = {}

    def join(self, timeout: float) -> bool:
        """Join the job; return `False` if a signal stopped this process first.

        Args:
            timeout: Seconds to wait for the store.

        Raises:
            ValueError: If the store cannot be reached, or refuses the secret.
        """
        found = self._store.wait(
            self._member.host, timeout=timeout, stopped=self._stopped
        )
        if found is None:
            return False
        self._address, self._reached = found
        self._nonce = self._store.get(NONCE)
        Heartbeat(self._store, self.name, self._is_lost.set).start()
        member = dataclasses.replace(self._member, reached=self._reached)
        self._store.put_surely(f"join.{self.name}", dataclasses.asdict(member))
        return True

    def cut(self) -> None:
        """End the ranks, and follow no more orders: what has started it is gone."""
        self._is_cut.set()

    def follow(self, command: Command, job: str) -> int:
        """Do what the coordinator orders, to the end of the job.

        Args:
            command: The command that the ranks run.
            job: Id of the processes that this host starts.

        Returns:
            The exit code of the job.

        Raises:
            ValueError: If the first host is lost, or has no use for this host.
        """
        threading.Thread(target=self._listen, daemon=True).start()
        begin, last, said = time.monotonic(), -1, ""
        while not self._is_cut.is_set():
            order = self._order
            if order.get("do") == "exit":
                if order["text"]:
                    print_message(order["text"])
                self._store.put(f"left.{self.name}", True)
                return int(order["code"])
            if order.get("do") == "wait":
                if order["text"] != said:
                    said = order["text"]
                    print_message(said)
            elif order and order["start"] != last:
                last = order["start"]
                # Another host may have failed before this one has seen the start.
                is_run = order["do"] == "run"
                report = self._run(order, command, job) if is_run else Report()
                name = f"report.{last}.{self.name}"
                self._store.put_surely(name, report.values())
            self._check_first_host()
            if last < 0:
                self._check_needed(time.monotonic() - begin)
            self._forward_stop()
            if self._stopped and last < 0 and not self._is_first:
                self._store.put(f"left.{self.name}", True)
                return 128 + self._stopped[0]  # nobody waits for this host
            time.sleep(_LOOK_SECONDS)
        return 128 + signal.SIGHUP

    def _listen(self) -> None:
        """In a thread: keep what the coordinator orders, to the end of the job."""
        for order in self._store.follow(f"order.{self.name}"):
            self._order = order or {}
            if order is None and self._store.get(NONCE) not in (None, self._nonce):
                self._is_replaced.set()
            gone = (self._is_lost, self._is_replaced, self._is_cut)
            is_over = self._order.get("do") == "exit"
            if is_over or any(each.is_set() for each in gone):
                return

    def _check_first_host(self) -> None:
        meeting = f"{self._store.address}:{self._store.port}"
        if self._is_lost.is_set():
            raise ValueError(
                "The first host was lost, and the job ends with it. Received: no "
                f"answer from {meeting} for {LOST_SECONDS:g} s. Start the same "
                "command on all hosts again; with `resume=` it goes on."
            )
        if self._is_replaced.is_set():
            raise ValueError(
                "The command of the first host was started again, and the job that it "
                f"had before has ended. Received: another job at {meeting}. Start the "
                "same command here again; with `resume=` it goes on."
            )

    def _check_needed(self, seconds: float) -> None:
        """Raise if this host has waited for its first start in vain."""
        # The first host says who is missing, before. Where hosts come and go, one may
        # wait for as long as the job.
        is_late = seconds > self._timeout + _MORE_SECONDS
        if is_late and not self._member.is_elastic:
            raise ValueError(
                "The job has all its hosts. Received: one more, "
                f"{self._member.host}, which was not needed for {seconds:.0f} s."
            )

    def _run(self, order: Mapping[str, Any], command: Command, job: str) -> Report:
        """Run this host's ranks to their end, or until an order ends them."""
        secret = secret_of_start(self._secret, order["nonce"], order["start"])
        own = self._address
        if own.startswith("127.") and order["reached"]:
            own = order["reached"]  # as the others see this host
        assignment = Assignment(
            slots=[Slot(**slot) for slot in order["slots"]],
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
            if not horovod_library.uses_named_network():
                check_own_name(own)
            return run_ranks(command, assignment, job, address=own, stopped=stops)
        except (OSError, RuntimeError, ValueError) as error:
            return Report(error=str(error))
        finally:
            is_over.set()
            watch.join()

    def _watch(self, stops: list[int], is_over: threading.Event) -> None:
        """Stop the ranks at an order, a signal, or when the coordinator is gone."""
        while not (stops or is_over.wait(_LOOK_SECONDS)):
            order = self._order or {"do": "run"}
            self._forward_stop()
            gone = (self._is_lost, self._is_replaced, self._is_cut)
            if self._stopped:
                stops.append(self._stopped[0])
            elif any(each.is_set() for each in gone):
                stops.append(signal.SIGHUP)
            elif order["do"] == "save":
                stops.append(signal.SIGTERM)
            elif order["do"] != "run":
                stops.append(signal.SIGHUP)

    def _forward_stop(self) -> None:
        """Let the coordinator know of a signal, which ends the job on all hosts."""
        if self._stopped:
            self._store.put(f"stopped.{self.name}", self._stopped[0])


@dataclasses.dataclass(frozen=True)
class Header:
    """What the agent of a host has to know, which ssh brings on standard input.

    Args:
        address: Address of the launcher's host.
        port: Port of its store.
        secret: Secret of the job.
        name: Id of the agent.
        host: Name of its host, as the user has named it.
        least: How many hosts the job has, at least.
        most: How many hosts it has, at most.
        job: Id of the agent's processes.
        folder: The folder in which the ranks run.
        command: The command that they run.
    """

    address: str
    port: int
    secret: str
    name: str
    host: str
    least: int
    most: int
    job: str
    folder: str
    command: Command

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
        agent = agent_of(header, stopped)
        # After the fork of the reaper, which must come before the first thread.
        threading.Thread(
            target=_wait_for_end, args=[lines, agent.cut], daemon=True
        ).start()
        if not agent.join(JOIN_SECONDS):
            return 128 + stopped[0]
        return agent.follow(header.command, header.job)


def agent_of(header: Header, stopped: list[int]) -> Agent:
    """Return the agent that a header describes.

    Args:
        header: The header.
        stopped: Numbers of the signals that this process has received.
    """
    return Agent(
        StoreClient(header.address, header.port, header.secret),
        header.secret,
        Member(
            host=header.host,
            num_ranks=1,  # whoever has started it knows how many
            number=None,
            num_hosts=header.most,
            version=__version__,
            is_quiet=True,
            min_hosts=header.least,
        ),
        is_first=False,
        timeout=math.inf,
        stopped=stopped,
        name=header.name,
    )


def _wait_for_end(lines: io.RawIOBase | io.BytesIO, cut: Callable[[], None]) -> None:
    while lines.readline():  # the launcher sends no more lines
        pass
    cut()
