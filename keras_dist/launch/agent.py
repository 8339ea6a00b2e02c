"""Run the ranks of one host: started by the launcher on each host of several."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

from keras_dist.launch import horovod_library, processes
from keras_dist.launch.assignment import Assignment, assignment_of
from keras_dist.launch.heartbeat import Heartbeat, check_reach
from keras_dist.launch.hosts import LOOPBACK, address_towards
from keras_dist.launch.monitor.status_store import StatusStore, status_store_of
from keras_dist.launch.own_name import check_own_name
from keras_dist.launch.ranks import Command
from keras_dist.launch.relays import Exit
from keras_dist.launch.rendezvous import variables_of
from keras_dist.launch.reports import Report, report_of, run_ranks
from keras_dist.launch.signals import stopped_by_signals

# The launcher sends one of these lines when the ranks have to end: at once, or when
# they have saved. The end of the connection means the first.
STOP, SAVE = "stop\n", "save\n"

# How often the report is sent until the store takes it.
_ATTEMPTS = 5


def start_message(
    command: Command, assignment: Assignment, *, job: str, launcher: str
) -> str:
    """The line that the launcher writes to the standard input of an agent.

    Args:
        command: The command that the agent's ranks run.
        assignment: The ranks of the agent's host.
        job: Id of the agent's processes.
        launcher: Address of the launcher's host. The ranks listen on the network
            interface that leads to it.
    """
    message = {
        "command": dataclasses.asdict(command),
        "assignment": dataclasses.asdict(assignment),
        "job": job,
        "towards": launcher,
        "folder": os.getcwd(),
    }
    return json.dumps(message) + "\n"


def serve() -> int:
    """Read a start message from standard input, and run the ranks until they end.

    Returns:
        The exit code of the rank that failed first on this host; 0 if none failed.
    """
    # Without a buffer, whose lock a waiting thread would hold when Python ends.
    lines = io.FileIO(0, closefd=False)
    message, command, assignment = start_of(lines.readline())
    address = _checked(message, assignment)
    with processes.reaper(message["job"]), stopped_by_signals() as stopped:
        # After the fork of the reaper, which must come before the first thread.
        assignment = _by_tls(assignment, message["towards"])
        store, number = status_store_of(assignment.store), assignment.number
        assert store is not None and number is not None  # `start_of` has checked it
        threading.Thread(
            target=_wait_for_stop, args=[lines, stopped], daemon=True
        ).start()
        Heartbeat(store, number, lambda: stopped.append(signal.SIGHUP)).start()
        report = run_ranks(
            command, assignment, message["job"], address=address, stopped=stopped
        )
        put_report(store, number, report)
    return report.code


def start_of(line: bytes) -> tuple[dict[str, Any], Command, Assignment]:
    """The start message that `start_message` has made to a line.

    Raises:
        ValueError: If it is not one.
    """
    try:
        message = json.loads(line)
        command = Command(**message["command"])
        assignment = assignment_of(message["assignment"])
        slots, store = assignment.slots, status_store_of(assignment.store)
        is_whole = bool(slots) and store is not None and assignment.number is not None
        texts = [message[name] for name in ("folder", "job", "towards")]
        is_whole &= all(isinstance(text, str) and "\0" not in text for text in texts)
        is_whole &= _port(assignment) >= 0
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            "The agent of a host is started by `keras-dist run -H`, which sends it a "
            f"message. Received: {line[:50]!r}. The versions of keras_dist on the "
            "hosts have to be the same."
        )
    return message, command, assignment


def _by_tls(assignment: Assignment, launcher: str) -> Assignment:
    """The same, with the store as this host's ranks reach it where it has TLS."""
    tls = assignment.tls
    if tls is None:
        return assignment
    link = Exit(launcher, tls["port"], tls["digest"])
    link.start()
    store = variables_of(LOOPBACK, link.port, assignment.secret)
    return dataclasses.replace(assignment, store=store)


def _port(assignment: Assignment) -> int:
    """The port of the store on the launcher's host."""
    if assignment.tls is None:
        return int(assignment.store["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    port, digest = assignment.tls["port"], assignment.tls["digest"]
    if type(port) is not int or not isinstance(digest, str):
        raise TypeError(assignment.tls)
    return port


def _checked(message: Mapping[str, Any], assignment: Assignment) -> str:
    """Check that this host's ranks could take part; return the address of the host.

    Raises:
        ValueError: If they could not.
    """
    try:
        os.chdir(message["folder"])
    except OSError as error:
        raise ValueError(
            "The folder in which the job was started is needed on each host. "
            f"Received: {error}, on {socket.gethostname()}."
        ) from error
    check_reach(message["towards"], _port(assignment))
    own = address_towards(message["towards"])
    if not horovod_library.uses_named_network():
        check_own_name(own)
    return own


def read_reports(store: StatusStore, num_agents: int) -> dict[int, Report]:
    """Read the reports of all agents that have sent one, by the index of the host.

    Args:
        store: The store of the job.
        num_agents: Number of agents.
    """
    found = store.get_all(_name("")) or {}
    reports = {}
    for number in range(num_agents):
        name = _name(number)
        values = found[name] if name in found else store.get(name)
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            reports[number] = report_of(values)  # else it is no report
    return reports


def put_report(store: StatusStore, number: int, report: Report) -> None:
    """Write the report of an agent to the store, for `read_reports`.

    Args:
        store: The store of the job.
        number: Index of the agent.
        report: Its report.
    """
    # Without a report the host counts as lost, and the store may be busy.
    any(store.put(_name(number), report.values()) for _ in range(_ATTEMPTS))


def _name(number: int | str) -> str:
    return f"host.{number}"


def _wait_for_stop(lines: io.RawIOBase | io.BytesIO, stopped: list[int]) -> None:
    # Another line is none of the launcher's; the end of the input has no line.
    while (line := lines.readline()) not in (b"", STOP.encode()):
        if line == SAVE.encode():
            stopped.append(signal.SIGTERM)
            return
    stopped.append(signal.SIGHUP)
