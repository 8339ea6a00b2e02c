"""Run the ranks of one host: started by the launcher on each host of several."""

import dataclasses
import json
import os
import signal
import sys
import threading
from typing import Any

from keras_dist.launch import processes
from keras_dist.launch.failures import Failure, first_of
from keras_dist.launch.hosts import Slot, address_towards
from keras_dist.launch.ranks import Command, Ranks
from keras_dist.launch.rendezvous import interface
from keras_dist.launch.signals import stopped_by_signals
from keras_dist.monitor.status_store import StatusStore, status_store_of

# The launcher sends this line when the ranks have to end. The end of the connection
# means the same.
STOP = "stop\n"


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
    os.chdir(message["folder"])
    with processes.reaper(message["job"]), stopped_by_signals() as stopped:
        # After the fork of the reaper, which must come before the first thread.
        threading.Thread(target=_wait_for_stop, args=[stopped], daemon=True).start()
        plain = Command(**message["command"])
        variables = interface(address_towards(message["towards"]))
        environment = {**plain.environment, **variables}
        command = dataclasses.replace(plain, environment=environment)
        slots = [Slot(**slot) for slot in message["slots"]]
        ranks = Ranks(command, slots, message["job"])
        failures: list[Failure] = []
        try:
            ranks.start()
            failures = ranks.wait(stopped)
            positions = ranks.where()
            store = status_store_of(command.environment)
            if store is not None:
                _put_report(store, message["number"], failures, positions)
        finally:
            ranks.end()
    return failures[0].code if failures else 0


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


def _put_report(
    store: StatusStore, number: int, failures: list[Failure], positions: dict[int, str]
) -> None:
    """Write the report of this agent to the store."""
    values = [dataclasses.asdict(failure) for failure in failures]
    store.put(f"host.{number}", {"failures": values, "where": positions})


def _wait_for_stop(stopped: list[int]) -> None:
    sys.stdin.readline()
    stopped.append(signal.SIGTERM)
