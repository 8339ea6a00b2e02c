"""What the caller of ranks in Ray or Spark gets when one of them has failed."""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass

from keras_dist.launch.failures import explain, explain_lost
from keras_dist.launch.reports import Report, merged

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
        for rank, report in self.reports.items():
            if report.error:
                raise RuntimeError(
                    "A rank could not be started. "
                    f"Received: rank {rank}{self._on_host(rank)}: {report.error}"
                )
        failures, _ = merged(list(self.reports.values()))
        if self.cause is not None and all(each.is_secondary for each in failures):
            rank, text = self.cause
            raise self._lost(f"the {system} of rank {rank}{self._on_host(rank)} {text}")
        if failures:
            raise self._first_failure()
        if self.reason:
            raise self._lost(f"each {system} was ended before its rank")

    def _first_failure(self) -> Exception:
        """The error of the rank that failed first; its cause is what all ranks did."""
        failures, where = merged(list(self.reports.values()))
        text = explain(
            failures,
            where,
            num_ranks=self.size,
            hosts=self.hosts,
            unknown=self._unknown(),
        )
        report, rank = RuntimeError(text), failures[0].rank
        error = error_in(self.found.get(rank, b""))
        if error is None:
            return report
        error.__cause__ = report
        return error

    def _lost(self, text: str) -> RuntimeError:
        failures, where = merged(list(self.reports.values()))
        reason = f" ({self.reason})" if self.reason else ""
        return RuntimeError(
            explain_lost(
                f"{text}{reason}.",
                failures,
                where,
                hosts=self.hosts,
                unknown=self._unknown(),
            )
        )

    def _unknown(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.reports]

    def _on_host(self, rank: int) -> str:
        return f" on {self.hosts[rank]}" if rank in self.hosts else ""


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
