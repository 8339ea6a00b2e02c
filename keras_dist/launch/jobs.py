"""Run a job, and restart it after a failure."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_dist.launch import agent, processes
from keras_dist.launch.assignment import Assignment, assignments
from keras_dist.launch.failures import explain, print_message
from keras_dist.launch.hosts import LOOPBACK, Slot
from keras_dist.launch.ranks import Command
from keras_dist.launch.remote_hosts import Reach, RemoteHosts
from keras_dist.launch.rendezvous import rendezvous
from keras_dist.launch.reports import lost_text, ranks_in_words, run_ranks, verdict
from keras_dist.launch.restarts import Restarts
from keras_dist.launch.signals import is_saving, stopped_by_signals, stopped_text


@dataclass(frozen=True)
class _Outcome:
    """How one start of a job has ended.

    Args:
        code: The exit code.
        is_host_lost: Whether a host was lost, or could not be reached.
        has_saved: Whether it was stopped, and all ranks have saved.
    """

    code: int
    is_host_lost: bool = False
    has_saved: bool = False


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
    again = Restarts(restarts)
    # The reaper is forked, so before the first thread.
    with processes.reaper(job), stopped_by_signals() as stopped:
        while True:
            outcome = _run_once(command, slots, job, reach, again.number, stopped)
            if not outcome.code or stopped:
                break
            is_lost = outcome.is_host_lost
            if not again.wait(is_host_lost=is_lost, is_stopped=lambda: bool(stopped)):
                break
    if stopped:
        print_message(stopped_text(stopped[0], has_saved=outcome.has_saved))
        return 128 + stopped[0]
    return outcome.code


def _run_once(
    command: Command,
    slots: Sequence[Slot],
    job: str,
    reach: Reach | None,
    restart: int,
    stopped: list[int],
) -> _Outcome:
    secret = secrets.token_hex(16)
    address = LOOPBACK if reach is None else reach.address
    with rendezvous(slots, secret, address) as found:
        planned = assignments(slots, found, secret, restart=restart)
        if reach is not None:
            return _run_on_hosts(RemoteHosts(command, planned, job, reach), stopped)
        return _run_here(command, planned[0], job, stopped)


def _run_here(
    command: Command, assignment: Assignment, job: str, stopped: list[int]
) -> _Outcome:
    report = run_ranks(command, assignment, job, address=LOOPBACK, stopped=stopped)
    if stopped or not report.failures:
        return _Outcome(0, has_saved=report.saved)
    size = len(assignment.slots)
    print_message(explain(report.failures, report.where, num_ranks=size))
    return _Outcome(report.code)


def _run_on_hosts(remote: RemoteHosts, stopped: list[int]) -> _Outcome:
    codes: dict[str, int] = {}
    try:
        remote.start()
        remote.wait(stopped)
    finally:
        codes = remote.end(is_saving=is_saving(stopped))
    reports = agent.read_reports(remote.store, len(remote.hosts))
    if not codes or stopped:
        has_all = len(reports) == len(remote.hosts)
        return _Outcome(0, has_saved=has_all and all(r.saved for r in reports.values()))
    silent = [number for number in range(len(remote.hosts)) if number not in reports]
    cause = _host_to_blame(remote, silent, codes)
    hosts = {r: h for n, h in enumerate(remote.hosts) for r in remote.ranks_of(n)}
    unknown = [rank for number in silent for rank in remote.ranks_of(number)]
    text, code = verdict(list(reports.values()), cause, hosts=hosts, unknown=unknown)
    print_message(text)
    return _Outcome(code, is_host_lost=cause is not None)


def _host_to_blame(
    remote: RemoteHosts, silent: Sequence[int], codes: Mapping[str, int]
) -> tuple[str, int] | None:
    """What happened to a host that has sent no report, and the job's exit code."""
    failed = [number for number in silent if remote.hosts[number] in codes]
    if not failed:
        return None
    number = next(iter(remote.lost), failed[0])
    host, ranks = remote.hosts[number], remote.ranks_of(number)
    named = ranks_in_words(ranks)
    if number in remote.lost:
        return lost_text(host, ranks), 1
    code = codes[host] if codes[host] > 0 else 128 - codes[host]
    if not remote.has_run(number):
        return f"no ranks could be run on {host}: exit code {code}.", code
    return (
        f"the agent on {host} was killed, or the connection to it was lost, while "
        f"{named} ran: exit code {code}.",
        code,
    )
