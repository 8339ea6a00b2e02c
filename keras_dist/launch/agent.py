"""Run the ranks of one host: started by the launcher on each host of several."""

import dataclasses
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

from keras_dist.install import patch
from keras_dist.launch import processes
from keras_dist.launch.failures import Failure, first_of
from keras_dist.launch.heartbeat import Heartbeat, check_reach
from keras_dist.launch.hosts import Slot, address_towards
from keras_dist.launch.own_name import check_own_name
from keras_dist.launch.ranks import Command, Ranks
from keras_dist.launch.rendezvous import interface
from keras_dist.launch.signals import stopped_by_signals
from keras_dist.monitor.status_store import StatusStore, status_store_of

# The launcher sends one of these lines when the ranks have to end: at once, or when
# they have saved. The end of the connection means the first.
STOP, SAVE = "stop\n", "save\n"

# How often the report is sent until the store takes it.
_ATTEMPTS = 5


def start_message(
    command: Command, slots: list[Slot], *, job: str, launcher: str, number: int
) -> str:
    """The line that the launcher writes to the standard input of an agent.

    Args:
        command: The command that the agent's ranks run.
        slots: The slots of the agent's ranks.
        job: Id of the agent's processes.
        launcher: Address of the launcher's host. The ranks listen on the network
            interface that leads to it.
        number: Index of the agent's host.
    """
    message = {
        "command": dataclasses.asdict(command),
        "slots": [dataclasses.asdict(slot) for slot in slots],
        "job": job,
        "towards": launcher,
        "number": number,
        "folder": os.getcwd(),
    }
    return json.dumps(message) + "\n"


def serve() -> int:
    """Read a start message from standard input, and run the ranks until they end.

    Returns:
        The exit code of the rank that failed first on this host; 0 if none failed.
    """
    message = json.loads(sys.stdin.readline())
    command = _prepared(message)
    store = status_store_of(command.environment)
    assert store is not None
    with processes.reaper(message["job"]), stopped_by_signals() as stopped:
        # After the fork of the reaper, which must come before the first thread.
        threading.Thread(target=_wait_for_stop, args=[stopped], daemon=True).start()
        Heartbeat(
            store, message["number"], lambda: stopped.append(signal.SIGHUP)
        ).start()
        slots = [Slot(**slot) for slot in message["slots"]]
        ranks = Ranks(command, slots, message["job"])
        failures: list[Failure] = []
        positions: dict[int, str] = {}
        try:
            ranks.start()
            failures = ranks.wait(stopped)
            positions = ranks.where()
        finally:
            ranks.end(is_saving=stopped[:1] == [signal.SIGTERM])
        _put_report(store, message["number"], failures, positions, ranks.has_saved)
    return failures[0].code if failures else 0


def _prepared(message: Mapping[str, Any]) -> Command:
    """The command with the variables of this host, which is checked first.

    Raises:
        ValueError: If the ranks of this host could not take part.
    """
    try:
        os.chdir(message["folder"])
    except OSError as error:
        raise ValueError(
            "The folder in which the job was started is needed on each host. "
            f"Received: {error}, on {socket.gethostname()}."
        ) from error
    plain = Command(**message["command"])
    port = int(plain.environment["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    check_reach(message["towards"], port)
    own = address_towards(message["towards"])
    if not patch.is_installed():
        check_own_name(own)
    environment = {**plain.environment, **interface(own)}
    return dataclasses.replace(plain, environment=environment)


def read_reports(
    store: StatusStore, num_agents: int
) -> tuple[list[Failure], dict[int, str]]:
    """Read the reports of all agents.

    Args:
        store: The store of the job.
        num_agents: Number of agents.

    Returns:
        The failures, the first one first; and the positions of the ranks, by rank.
    """
    failures: list[Failure] = []
    positions: dict[int, str] = {}
    for number in range(num_agents):
        report: dict[str, Any] = store.get(f"host.{number}") or {}
        failures += [Failure(**failure) for failure in report.get("failures", [])]
        positions |= {int(rank): text for rank, text in report.get("where", {}).items()}
    return first_of(failures), positions


def reported(store: StatusStore, num_agents: int) -> dict[int, bool]:
    """The agents that have sent a report, and whether all of their ranks have saved.

    Args:
        store: The store of the job.
        num_agents: Number of agents.
    """
    reports = {number: store.get(f"host.{number}") for number in range(num_agents)}
    return {number: bool(r["saved"]) for number, r in reports.items() if r is not None}


def _put_report(
    store: StatusStore,
    number: int,
    failures: list[Failure],
    positions: dict[int, str],
    has_saved: bool,
) -> None:
    """Write the report of this agent to the store."""
    values = [dataclasses.asdict(failure) for failure in failures]
    report = {"failures": values, "where": positions, "saved": has_saved}
    # Without a report the host counts as lost, and the store may be busy.
    any(store.put(f"host.{number}", report) for _ in range(_ATTEMPTS))


def _wait_for_stop(stopped: list[int]) -> None:
    is_saving = sys.stdin.readline() == SAVE
    stopped.append(signal.SIGTERM if is_saving else signal.SIGHUP)
