"""Run a job, and restart it after a failure."""

import secrets
import signal
from collections.abc import Sequence
from dataclasses import replace

from keras_dist.launch import agent, processes
from keras_dist.launch.failures import explain, print_message
from keras_dist.launch.hosts import LOOPBACK, Slot
from keras_dist.launch.ranks import Command, Ranks
from keras_dist.launch.remote_hosts import Reach, RemoteHosts
from keras_dist.launch.rendezvous import interface, rendezvous
from keras_dist.launch.signals import stopped_by_signals
from keras_dist.monitor.status_store import status_store_of

# The variable with the secret by which the ranks sign objects that they send.
SECRET = "KERAS_DIST_SECRET"

# The variable with the number of the restart, from 1; not set in the first run.
RESTART = "KERAS_DIST_RESTART"


def run_command(
    command: Command,
    slots: Sequence[Slot],
    *,
    restarts: int = 0,
    reach: Reach | None = None,
) -> int:
    """Run a command on all ranks, and end every process that they have started.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        slots: The slots of the ranks.
        restarts: The largest number of restarts after failures.
        reach: How other hosts are reached; `None` if all ranks are on this one.

    Returns:
        The exit code: 0, or that of the rank that failed first, or 128 + the number of
        the signal that stopped the job.

    Raises:
        RuntimeError: If Horovod is not installed.
        ValueError: If a number is too small.
    """
    if not slots or restarts < 0:
        raise ValueError(
            "At least one rank is needed, and no negative number of restarts. "
            f"Received: -np {len(slots)} --restarts {restarts}"
        )
    job = secrets.token_hex(8)
    # The reaper is forked, so before the first thread.
    with processes.reaper(job), stopped_by_signals() as stopped:
        for restart in range(restarts + 1):
            code = _run_once(command, slots, job, reach, restart, stopped)
            if stopped:
                print_message(
                    f"keras-dist: ended by {signal.Signals(stopped[0]).name}."
                )
                return 128 + stopped[0]
            if code == 0 or restart == restarts:
                return code
            print_message(f"keras-dist: start {restart + 2} of at most {restarts + 1}.")
    return code


def _run_once(
    command: Command,
    slots: Sequence[Slot],
    job: str,
    reach: Reach | None,
    restart: int,
    stopped: list[int],
) -> int:
    secret = secrets.token_hex(16)
    address = LOOPBACK if reach is None else reach.address
    with rendezvous(slots, secret, address) as found:
        environment = {**command.environment, **found, SECRET: secret}
        if restart:
            environment[RESTART] = str(restart)
        full = replace(command, environment=environment)
        if reach is not None:
            return _run_on_hosts(full, RemoteHosts(full, slots, job, reach), stopped)
        return _run_here(full, slots, job, stopped)


def _run_here(
    command: Command, slots: Sequence[Slot], job: str, stopped: list[int]
) -> int:
    own = {**command.environment, **interface(LOOPBACK)}
    ranks = Ranks(replace(command, environment=own), slots, job)
    message = ""
    try:
        ranks.start()
        failures = ranks.wait(stopped)
        if failures and not stopped:
            message = explain(failures, ranks.where(), num_ranks=len(slots))
    finally:
        ranks.end(is_saving=stopped == [signal.SIGTERM])
    if not message:
        return 0
    print_message(message)  # after the output of the ranks
    return failures[0].code


def _run_on_hosts(command: Command, remote: RemoteHosts, stopped: list[int]) -> int:
    codes: dict[str, int] = {}
    try:
        remote.start()
        remote.wait(stopped)
    finally:
        codes = remote.end()
    store = status_store_of(command.environment)
    assert store is not None
    failures, where = agent.read_reports(store, len(remote.hosts))
    if not codes or stopped:
        return 0
    if not failures:
        host, code = next(iter(codes.items()))
        print_message(f"keras-dist: no ranks could be run on {host}: exit code {code}.")
        return code if code > 0 else 128 - code
    print_message(explain(failures, where, num_ranks=remote.num_ranks))
    return failures[0].code
