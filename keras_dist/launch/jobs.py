"""Run a job, and restart it after a failure."""

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from keras_dist.launch import agent, processes
from keras_dist.launch.assignment import Assignment, assignments
from keras_dist.launch.failures import explain, print_message
from keras_dist.launch.hosts import LOOPBACK, Slot
from keras_dist.launch.ranks import Command
from keras_dist.launch.remote_hosts import Reach, RemoteHosts
from keras_dist.launch.rendezvous import Store
from keras_dist.launch.reports import (
    are_asked,
    blamed,
    lost_text,
    ranks_in_words,
    run_ranks,
    verdict,
)
from keras_dist.launch.restarts import Restarts
from keras_dist.launch.signals import SAVED, is_saving, stopped_by_signals, stopped_text
from keras_dist.launch.spares import Spares
from keras_dist.launch.tls import TlsStore

# Files that are open at once: three pipes of each host, a connection of each rank.
_FILES_OF_RANK = 8


@dataclass(frozen=True)
class Outcome:
    """How one start of a job has ended.

    Args:
        code: The exit code.
        lost: Hosts that were lost, or could not be reached.
        has_saved: Whether it was stopped, and all ranks have saved.
        is_change: Whether nothing has failed, and the next start has other hosts.
        failed: The host that has failed; empty if none has.
        why: In a few words, what has happened.
    """

    code: int
    lost: Sequence[str] = ()
    has_saved: bool = False
    is_change: bool = False
    failed: str = ""
    why: str = ""


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
        planned = assignments(slots, found, secret, restart=restart, tls=tls)
        if reach is not None:
            remote = RemoteHosts(command, planned, job, reach)
            return _run_on_hosts(remote, stopped, change)
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


def _run_on_hosts(
    remote: RemoteHosts, stopped: list[int], change: Callable[[], str]
) -> Outcome:
    codes: dict[str, int] = {}
    why = ""
    try:
        remote.start()
        why = remote.wait(stopped, change)
    finally:
        codes = remote.end(is_saving=bool(why) or is_saving(stopped))
    reports = agent.read_reports(remote.store, len(remote.hosts))
    has_all = len(reports) == len(remote.hosts)
    if stopped or not (codes or why):
        return Outcome(0, has_saved=has_all and all(r.saved for r in reports.values()))
    if why and has_all and are_asked(reports.values()):
        is_over = all(report.finished for report in reports.values())
        return Outcome(0 if is_over else SAVED, is_change=True, why=why)
    silent = [number for number in range(len(remote.hosts)) if number not in reports]
    to_blame = _host_to_blame(remote, silent, codes)
    cause = (to_blame[1], to_blame[2]) if to_blame else None
    hosts = {r: h for n, h in enumerate(remote.hosts) for r in remote.ranks_of(n)}
    unknown = [rank for number in silent for rank in remote.ranks_of(number)]
    text, code = verdict(list(reports.values()), cause, hosts=hosts, unknown=unknown)
    print_message(text)
    lost = [remote.hosts[number] for number in silent] if to_blame else []
    by_host = (to_blame[0], f"host {to_blame[0]} was lost") if to_blame else ("", "")
    failed, why = blamed(reports.values(), hosts) or by_host
    return Outcome(code, lost, failed=failed, why=why)


def _host_to_blame(
    remote: RemoteHosts, silent: Sequence[int], codes: Mapping[str, int]
) -> tuple[str, str, int] | None:
    """A host that has sent no report, what happened there, and the job's exit code."""
    failed = [number for number in silent if remote.hosts[number] in codes]
    if not failed:
        return None
    number = next(iter(remote.lost), failed[0])
    host, ranks = remote.hosts[number], remote.ranks_of(number)
    named = ranks_in_words(ranks)
    if number in remote.lost:
        return host, lost_text(host, ranks), 1
    code = codes[host] if codes[host] > 0 else 128 - codes[host]
    if not remote.has_run(number):
        return host, f"no ranks could be run on {host}: exit code {code}.", code
    return (
        host,
        f"the agent on {host} was killed, or the connection to it was lost, while "
        f"{named} ran: exit code {code}.",
        code,
    )
