"""Run a job, and restart it after a failure."""

import contextlib
import secrets
from collections.abc import Callable, Sequence

from keras_dist.launch import processes
from keras_dist.launch.assignment import Assignment, assignments, seed_of
from keras_dist.launch.failures import explain, print_message
from keras_dist.launch.hosts import LOOPBACK, Slot
from keras_dist.launch.ranks import Command
from keras_dist.launch.reach import Reach
from keras_dist.launch.remote_hosts import RemoteHosts
from keras_dist.launch.remote_start import run_on_hosts
from keras_dist.launch.rendezvous import Store
from keras_dist.launch.reports import run_ranks
from keras_dist.launch.restarts import Outcome, Restarts
from keras_dist.launch.signals import stopped_by_signals, stopped_text
from keras_dist.launch.spares import Spares
from keras_dist.launch.tls import TlsStore

# Files that are open at once: three pipes of each host, a connection of each rank.
_FILES_OF_RANK = 8


def run_command(
    command: Command,
    slots: Sequence[Slot],
    *,
    restarts: int = 0,
    reach: Reach | None = None,
    spares: Spares | None = None,
) -> int:
    """Run a command on all ranks, and end every process that they have started.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        slots: The slots of the ranks.
        restarts: The largest number of restarts after failures.
        reach: How other hosts are reached; `None` if all ranks are on this one.
        spares: As of `Ranks`, if all ranks are on this host.

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
    again = Restarts(restarts)
    # The reaper is forked, so before the first thread.
    with processes.reaper(job), stopped_by_signals() as stopped:
        while True:
            outcome = run_once(
                command,
                slots,
                job,
                reach,
                restart=again.number,
                stopped=stopped,
                spares=spares,
            )
            if not outcome.code or stopped:
                break
            is_lost = bool(outcome.lost)
            if not again.wait(is_host_lost=is_lost, is_stopped=lambda: bool(stopped)):
                break
    if stopped:
        print_message(stopped_text(stopped[0], has_saved=outcome.has_saved))
        return 128 + stopped[0]
    return outcome.code


def run_once(
    command: Command,
    slots: Sequence[Slot],
    job: str,
    reach: Reach | None,
    *,
    restart: int,
    stopped: list[int],
    change: Callable[[], str] = str,
    spares: Spares | None = None,
) -> Outcome:
    """Start all ranks, and wait for their end.

    Args:
        command: The command that they run.
        slots: Their slots.
        job: Id of the job.
        reach: As of `run_command`.
        restart: Number of the restart; 0 in the first run.
        stopped: Numbers of the signals that have stopped the job.
        change: Returns why the ranks should save and end, or an empty text; for hosts
            that are reached.
        spares: As of `Ranks`, if all ranks are on this host.
    """
    processes.allow_files(_FILES_OF_RANK * len(slots))
    secret = secrets.token_hex(16)
    address = LOOPBACK if reach is None else reach.address
    has_tls = reach is not None and reach.has_tls
    store = TlsStore(address) if has_tls else Store(address)
    with contextlib.closing(store):
        store.open(slots, secret)
        found, tls = store.variables(secret), None
        if isinstance(store, TlsStore):
            tls = store.tls
        planned = assignments(
            slots, found, secret, restart=restart, tls=tls, seed=seed_of(job)
        )
        if reach is not None:
            remote = RemoteHosts(command, planned, job, reach)
            return run_on_hosts(remote, stopped, change)
        return _run_here(command, planned[0], job, stopped, spares)


def _run_here(
    command: Command,
    assignment: Assignment,
    job: str,
    stopped: list[int],
    spares: Spares | None,
) -> Outcome:
    report = run_ranks(
        command, assignment, job, address=LOOPBACK, stopped=stopped, spares=spares
    )
    if stopped or not report.failures:
        return Outcome(0, has_saved=report.saved)
    size = len(assignment.slots)
    print_message(explain(report.failures, report.where, num_ranks=size))
    return Outcome(report.code)
