"""How the ranks of each host have ended, as the hosts report it to who watches them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.launch.assignment import Assignment
from keras_dist.launch.failures import Failure, first_of
from keras_dist.launch.ranks import Command, Ranks
from keras_dist.launch.signals import is_saving


@dataclasses.dataclass(frozen=True)
class Report:
    """How the ranks of one host have ended.

    Args:
        failures: The failures of ranks, the first one first.
        where: The position of each rank in words, as of `Ranks.where`.
        saved: Whether all ranks were asked to end, and have saved.
        error: Why no rank could be started; empty if they were.
    """

    failures: Sequence[Failure] = ()
    where: Mapping[int, str] = dataclasses.field(default_factory=dict)
    saved: bool = False
    error: str = ""

    def values(self) -> dict[str, Any]:
        """The report as values of JSON."""
        return dataclasses.asdict(self)

    @property
    def code(self) -> int:
        """The exit code of the rank that failed first; 0 if none failed."""
        return self.failures[0].code if self.failures else 1 if self.error else 0


def report_of(values: Mapping[str, Any]) -> Report:
    """The report that `Report.values` has made to values of JSON."""
    return Report(
        failures=[Failure(**failure) for failure in values["failures"]],
        where={int(rank): text for rank, text in values["where"].items()},
        saved=bool(values["saved"]),
        error=values["error"],
    )


def merged(reports: Sequence[Report]) -> tuple[list[Failure], dict[int, str]]:
    """The failures of all hosts, the first one first; and where their ranks were."""
    failures = [failure for report in reports for failure in report.failures]
    where = {rank: text for report in reports for rank, text in report.where.items()}
    return first_of(failures), where


def run_ranks(
    command: Command,
    assignment: Assignment,
    job: str,
    *,
    address: str,
    stopped: Sequence[int],
) -> Report:
    """Run the ranks of this host until all have ended, one failed, or it is stopped.

    Args:
        command: The command that they run.
        assignment: Which ranks they are.
        job: Id of the job, by which their processes are found.
        address: Address of this host, by which the others reach it.
        stopped: Numbers of signals, to which others are appended; the ranks are ended
            when it is not empty, by SIGTERM with time to save.
    """
    environment = {**command.environment, **assignment.variables(address)}
    full = dataclasses.replace(command, environment=environment)
    ranks = Ranks(full, assignment.slots, job)
    failures: list[Failure] = []
    where: dict[int, str] = {}
    try:
        ranks.start()
        failures = ranks.wait(stopped)
        if failures or assignment.number is not None:  # or another host has failures
            where = ranks.where()
    finally:
        ranks.end(is_saving=is_saving(stopped))
    return Report(failures, where, ranks.has_saved)
