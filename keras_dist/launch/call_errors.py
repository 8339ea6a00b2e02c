"""What the caller of ranks in Ray or Spark gets when one of them has failed."""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass

from keras_dist.launch.failures import first_of
from keras_dist.launch.reports import Report, verdict

_UNKNOWN = "an unknown host"

# What `run_agent` raises behind the number of its rank.
LOST_AGENT = "has lost its agent"
NO_PACKAGE = "has no keras_dist in its Python"
_FOUND = re.compile(rf"rank (\d+) ({LOST_AGENT}|{NO_PACKAGE}, \S+)")


@dataclass(frozen=True)
class Ended:
    """How the ranks have ended.

    Args:
        size: Number of ranks.
        hosts: The host of each rank, as far as it is known.
        reports: The reports of the agents that have sent one, by rank.
        found: What each rank returned, or else its error, pickled; of the agents that
            have answered.
        cause: The rank whose actor or task has ended too early before all others, and
            what happened to it; `None` if there is none.
        reason: Why the system of the workers has ended the job, in its own words; empty
            if it has not.
    """

    size: int
    hosts: Mapping[int, str]
    reports: Mapping[int, Report]
    found: Mapping[int, bytes]
    cause: tuple[int, str] | None
    reason: str

    def raise_first(self, system: str) -> None:
        """Raise the first error, if there is one.

        Args:
            system: What has started the agents: "Ray actor" or "Spark task".
        """
        known = {rank: self.hosts.get(rank, _UNKNOWN) for rank in range(self.size)}
        for rank, report in self.reports.items():
            if report.error:
                raise RuntimeError(
                    "A rank could not be started. "
                    f"Received: rank {rank} on {known[rank]}: {report.error}"
                )
        reports = list(self.reports.values())
        failures = first_of([each for report in reports for each in report.failures])
        lost = self._lost(system, known)
        if not failures and lost is None:
            return
        text, _ = verdict(
            reports,
            None if lost is None else (lost, 1),
            hosts=known,
            unknown=[rank for rank in known if rank not in self.reports],
        )
        error = None
        if failures and (lost is None or not failures[0].is_secondary):
            error = error_in(self.found.get(failures[0].rank, b""))
        if error is None:
            raise RuntimeError(text)
        raise error from RuntimeError(text)

    def _lost(self, system: str, known: Mapping[int, str]) -> str | None:
        """What has happened, if it was not in a rank."""
        if self.cause is None and not self.reason:
            return None
        reason = f" ({self.reason})" if self.reason else ""
        if self.cause is None:
            return f"each {system} was ended before its rank{reason}."
        rank, text = self.cause
        return f"the {system} of rank {rank} on {known[rank]} {text}{reason}."


def cause_in(text: str) -> tuple[int, str] | None:
    """The rank and the cause that `run_agent` has raised, in a message of Ray or Spark.

    >>> cause_in("Job aborted: RuntimeError: rank 3 has lost its agent")
    (3, 'has lost its agent')
    """
    found = _FOUND.search(text)
    return None if found is None else (int(found[1]), found[2])


def error_in(outcome: bytes) -> Exception | None:
    """The error of a rank, if it could be pickled and can be loaded here.

    Args:
        outcome: What the rank has left: its pickled error.
    """
    try:
        error = pickle.loads(outcome)
    except Exception:  # whatever loading an object of the user's raises
        return None
    return error if isinstance(error, Exception) else None
