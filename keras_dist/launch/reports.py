"""How the ranks of each host have ended, as the hosts report it to who watches them."""

import dataclasses
import os
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from keras_dist.launch import mpi
from keras_dist.launch.assignment import Assignment
from keras_dist.launch.failures import (
    Failure,
    explain,
    explain_lost,
    first_of,
    print_message,
)
from keras_dist.launch.gpus import num_gpus
from keras_dist.launch.heartbeat import LOST_SECONDS
from keras_dist.launch.monitor.rank_ranges import ranges
from keras_dist.launch.ranks import Command, Ranks
from keras_dist.launch.spares import Spares

# Exit code of a rank that has not begun to handle SIGTERM.
_BY_SIGTERM = 128 + signal.SIGTERM


@dataclasses.dataclass(frozen=True)
class Report:
    """How the ranks of one host have ended.

    Args:
        failures: The failures of ranks, the first one first.
        where: The position of each rank in words, as of `Ranks.where`.
        saved: Whether all ranks were asked to end, and have saved.
        error: Why no rank could be started; empty if they were.
        finished: Whether all ranks have ended by themselves, with exit code 0.
    """

    failures: Sequence[Failure] = ()
    where: Mapping[int, str] = dataclasses.field(default_factory=dict)
    saved: bool = False
    error: str = ""
    finished: bool = False

    def values(self) -> dict[str, Any]:
        """The report as values of JSON."""
        return dataclasses.asdict(self)

    @property
    def code(self) -> int:
        """The exit code of the rank that failed first; 0 if none failed."""
        return self.failures[0].code if self.failures else 1 if self.error else 0


def report_of(values: Mapping[str, Any]) -> Report:
    """The report that `Report.values` has made to values of JSON.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: If it is none.
    """
    failures = [Failure(**failure) for failure in values["failures"]]
    texts = [values["error"], *values["where"].values()]
    for failure in failures:
        texts += [failure.summary, failure.text]
        numbers = [failure.rank, failure.code, failure.is_secondary, failure.is_saved]
        is_timed = isinstance(failure.time, (int, float))
        if not is_timed or not all(isinstance(number, int) for number in numbers):
            raise TypeError(failure)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(texts)
    where = {int(rank): text for rank, text in values["where"].items()}
    saved, finished = bool(values["saved"]), bool(values["finished"])
    return Report(failures, where, saved, values["error"], finished)


def verdict(
    reports: Sequence[Report],
    cause: tuple[str, int] | None,
    *,
    hosts: Mapping[int, str],
    unknown: Collection[int],
) -> tuple[str, int]:
    """The message for the user, and the exit code, when a job on hosts has failed.

    Args:
        reports: The reports that have come.
        cause: What happened to a host, and the exit code for it; `None` for nothing.
            It counts if no rank was the first to fail.
        hosts: The host of each rank.
        unknown: Ranks of hosts that have sent no report.
    """
    failures = first_of([failure for report in reports for failure in report.failures])
    where = {rank: text for report in reports for rank, text in report.where.items()}
    if cause is not None and all(failure.is_secondary for failure in failures):
        text, code = cause
        text = explain_lost(text, failures, where, hosts=hosts, unknown=unknown)
        return text, code
    if failures:
        size = len(hosts)
        text = explain(failures, where, num_ranks=size, hosts=hosts, unknown=unknown)
        return text, failures[0].code
    return "keras-dist: the job was ended.", 1


def blamed(
    reports: Iterable[Report], hosts: Mapping[int, str]
) -> tuple[str, str] | None:
    """The host of the rank that failed first, and in a few words what has happened.

    Args:
        reports: The reports that have come.
        hosts: The host of each rank.

    Returns:
        `None` if no rank was the first to fail. The host is empty where the rank was
        asked to end, which is no failure of its host.
    """
    failures = first_of([failure for report in reports for failure in report.failures])
    if not failures or failures[0].is_secondary:
        return None
    first, host = failures[0], hosts[failures[0].rank]
    if first.is_saved:
        return "", f"rank {first.rank} on {host} was asked to end"
    return host, f"rank {first.rank} on {host} failed"


def are_asked(reports: Collection[Report]) -> bool:
    """Whether ranks that were asked to save and end have ended for this alone."""
    return not any(report.error for report in reports) and all(
        failure.is_secondary or failure.is_saved or failure.code == _BY_SIGTERM
        for report in reports
        for failure in report.failures
    )


def lost_text(host: str, ranks: Sequence[int], seconds: float = LOST_SECONDS) -> str:
    """What is said of a host that sends no heartbeats."""
    named = ranks_in_words(ranks)
    return f"host {host} does not answer since {seconds:g} s ({named})."


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Numbers of ranks in words.

    >>> ranks_in_words([1]), ranks_in_words([2, 3])
    ('rank 1', 'ranks 2, 3')
    """
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def run_ranks(
    command: Command,
    assignment: Assignment,
    job: str,
    *,
    address: str,
    stopped: Sequence[int],
    spares: Spares | None = None,
) -> Report:
    """Run the ranks of this host until all have ended, one failed, or it is stopped.

    Args:
        command: The command that they run.
        assignment: Which ranks they are.
        job: Id of the job, by which their processes are found.
        address: Address of this host, by which the others reach it.
        stopped: Numbers of signals, to which others are appended; the ranks are ended
            when it is not empty, by SIGTERM with time to save.
        spares: As of `Ranks`.
    """
    environment = {**command.environment, **assignment.variables(address)}
    gpus, ranks = num_gpus({**os.environ, **environment}), len(assignment.slots)
    if 0 < gpus < ranks and not assignment.restart:
        print_message(
            f"keras-dist: {ranks} ranks share {gpus} GPU{'s' * (gpus > 1)} of this "
            "host, and the memory there, which NCCL refuses. Start one for each GPU: "
            f"-np {gpus}"
        )
    full = dataclasses.replace(command, environment=environment)
    with mpi.variables(full, job, len(assignment.slots)) as own:
        return _run(
            Ranks(full, assignment.slots, job, spares, own), assignment, stopped
        )


def _run(ranks: Ranks, assignment: Assignment, stopped: Sequence[int]) -> Report:
    """As `run_ranks`, of ranks that have not started."""
    failures: list[Failure] = []
    where: dict[int, str] = {}
    finished = False
    try:
        ranks.start()
        failures = ranks.wait(stopped)
        finished = ranks.have_finished
        if failures or assignment.number is not None:  # or another host has failures
            where = ranks.where()
    finally:
        ranks.end(stopped)
    return Report(failures, where, ranks.has_saved, finished=finished)
