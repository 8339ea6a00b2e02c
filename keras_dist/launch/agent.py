"""The ranks of one host of several, started and watched there."""

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

# What the launcher says when the ranks have to end; so does the end of its connection.
STOP = "stop\n"


def order(
    command: Command, slots: list[Slot], *, job: str, towards: str, number: int
) -> str:
    """What an agent is told on its standard input, in one line.

    Args:
        command: What its ranks run.
        slots: Of its ranks.
        job: Number of the job on that host.
        towards: A host to which the ranks have to be reachable.
        number: Of the host.
    """
    order_of_host = {
        "command": dataclasses.asdict(command),
        "slots": [dataclasses.asdict(slot) for slot in slots],
        "job": job,
        "towards": towards,
        "number": number,
        "folder": os.getcwd(),
    }
    return json.dumps(order_of_host) + "\n"


def serve() -> int:
    """Run the ranks of this host, as standard input says, and end with them.

    Returns:
        The exit code of the rank that failed first on this host.
    """
    order_of_host = json.loads(sys.stdin.readline())
    os.chdir(order_of_host["folder"])
    with processes.reaper(order_of_host["job"]), stopped_by_signals() as stopped:
        # Only now: the warden forks.
        threading.Thread(target=_listen, args=[stopped], daemon=True).start()
        given = Command(**order_of_host["command"])
        found = interface(address_towards(order_of_host["towards"]))
        command = dataclasses.replace(given, environment={**given.environment, **found})
        slots = [Slot(**slot) for slot in order_of_host["slots"]]
        ranks = Ranks(command, slots, order_of_host["job"])
        failures: list[Failure] = []
        try:
            ranks.start()
            failures = ranks.wait(stopped)
            where = ranks.where()
            store = status_store_of(command.environment)
            if store is not None:
                _leave_word(store, order_of_host["number"], failures, where)
        finally:
            ranks.end()
    return failures[0].code if failures else 0


def words_of(store: StatusStore, numbers: int) -> tuple[list[Failure], dict[int, str]]:
    """What the agents have left: all failures in order, and where ranks were.

    Args:
        store: Of the job.
        numbers: How many agents there are.
    """
    failures: list[Failure] = []
    where: dict[int, str] = {}
    for number in range(numbers):
        word: dict[str, Any] = store.get(f"host.{number}") or {}
        failures += [Failure(**failure) for failure in word.get("failures", [])]
        where |= {int(rank): slot for rank, slot in word.get("where", {}).items()}
    return first_of(failures), where


def _leave_word(
    store: StatusStore, number: int, failures: list[Failure], where: dict[int, str]
) -> None:
    said = [dataclasses.asdict(failure) for failure in failures]
    store.put(f"host.{number}", {"failures": said, "where": where})


def _listen(stopped: list[int]) -> None:
    sys.stdin.readline()
    stopped.append(signal.SIGTERM)
