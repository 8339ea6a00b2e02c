"""A function that ranks call which another system has started: Ray or Spark.

Here is the driver's side: which worker is which rank, who has failed, and
what the caller gets. `call_agent` is the side of the workers.
"""

import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_dist.launch import agent
from keras_dist.launch.call_agent import SAVE, STOP, host_name, left_name
from keras_dist.launch.call_errors import LOST_AGENT, Ended
from keras_dist.launch.call_store import CallStore
from keras_dist.launch.function import pickled_call
from keras_dist.launch.heartbeat import LOST_SECONDS, Presence
from keras_dist.launch.reports import Report, report_of

# Seconds after the first failure in which others may fail and report, if its cause is
# on another rank; and in which the agents must end all ranks and answer.
_GRACE_SECONDS, _END_SECONDS = 3.0, 20.0

# Seconds in which they must, where the ranks may save before.
_SAVE_SECONDS = 50.0

# Seconds, after they were asked to end, in which agents report whose actor or task does
# not answer any more; and between two looks for that.
_REPORT_SECONDS, _TICK = 8.0, 0.2


class Calls:
    """The calls of one function by all ranks, as seen by the driver.

    Args:
        function, args, kwargs: As of `keras_dist.run`.
        size: Number of workers.
        address: Address or name of this host, by which the workers reach it.
        system: What the workers are, for messages: "Ray actor" or "Spark task".
        restart: Number of the restart; 0 in the first start.
        environment: Variables of all ranks.

    Raises:
        ValueError: If the store cannot listen at the address.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        *,
        size: int,
        address: str,
        system: str,
        restart: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.call = pickled_call(function, args, kwargs)
        self._size, self._system = size, system
        self._server = CallStore(address, restart, environment or {})
        self._store = self._server.store
        self._presence = Presence[int](self._store)
        # By rank, as they come in.
        self._hosts: dict[int, str] = {}
        self._reports: dict[int, Report] = {}
        # The first actor or task that has ended too early, and what happened to it.
        self._cause: tuple[int, str] | None = None
        self._reason = ""
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self.is_saving = False  # the agents were asked to let the ranks save, and end

    def close(self) -> None:
        """End the store."""
        self._server.close()

    def header(self) -> dict[str, Any]:
        """What each agent needs; `hosts`, of all workers, and `worker` are to be added.

        It contains the job's secret.
        """
        return self._server.header()

    def look(self) -> None:
        """Read what the agents have written; ask all to stop if one has failed."""
        running = [rank for rank in range(self._size) if rank not in self._reports]
        for rank in running:
            if rank not in self._hosts and (host := self._store.get(host_name(rank))):
                self._hosts[rank] = host
            if not self.is_stopping and self._store.get(left_name(rank)):
                self.lose(rank, "was killed")
        self._reports |= agent.read_reports(self._store, self._size)
        running = [rank for rank in running if rank not in self._reports]
        self._presence.look(running)
        for rank in self._presence.lost(running):
            self.lose(rank, f"does not answer since {LOST_SECONDS:g} s")
        reports = self._reports.values()
        failures = [failure for report in reports for failure in report.failures]
        has_error = any(report.error for report in reports)
        if self._failed_at is None and (failures or has_error):
            self._failed_at = time.monotonic()
        is_cause = has_error or not all(failure.is_secondary for failure in failures)
        if is_cause or _is_past(self._failed_at, _GRACE_SECONDS):
            self.stop()

    def lose(self, rank: int, cause: str) -> None:
        """Note that an actor or task has ended too early, and ask all to stop.

        Args:
            rank: Its rank.
            cause: What happened; that of the first one counts.
        """
        if not self._cause and not self.is_stopping:
            self._cause = rank, cause
        self.stop()

    def fail(self, reason: str) -> None:
        """Note that the system of the workers has ended the job.

        Args:
            reason: What it says of it.
        """
        self._reason = reason
        self.stop()

    def stop(self) -> None:
        """Ask all agents to end their ranks."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._store.put(STOP, SAVE if self.is_saving else True)

    def save(self) -> None:
        """Ask all agents to end their ranks when these have saved."""
        self.is_saving = self.is_saving or not self.is_stopping
        self.stop()

    @property
    def is_stopping(self) -> bool:
        """Whether the agents were asked to end their ranks."""
        return self._stopped_at is not None

    @property
    def is_overdue(self) -> bool:
        """Whether agents that were asked to end have had their time."""
        seconds = _SAVE_SECONDS if self.is_saving else _END_SECONDS
        return _is_past(self._stopped_at, seconds)

    def has_started(self) -> bool:
        """Whether all agents have answered."""
        return all(self._presence.has_answered(rank) for rank in range(self._size))

    def results(self, answers: Sequence[bytes]) -> list[Any]:
        """What each rank returned, by rank.

        Args:
            answers: What `run_agent` has returned, of the agents that have answered.

        Raises:
            Exception: The error of the rank that failed first, from a `RuntimeError`
                with its traceback.
            RuntimeError: If a rank, or what started it, has ended without an error.
        """
        if len(answers) < self._size:
            self._settle()
        found: dict[int, bytes] = {}
        for answer in answers:
            line, _, outcome = answer.partition(b"\n")
            values = json.loads(line)
            self._reports[values["rank"]] = report_of(values["report"])
            found[values["rank"]] = outcome
        ended = Ended(
            self._size, self._hosts, self._reports, found, self._cause, self._reason
        )
        ended.raise_first(self._system)
        return [pickle.loads(found[rank]) for rank in range(self._size)]

    def _settle(self) -> None:
        """Wait, for some seconds, until the agents that run have reported."""
        lost = self._cause[0] if self._cause and self._cause[1] == LOST_AGENT else -1
        while not _is_past(self._stopped_at, _REPORT_SECONDS):
            self.look()
            if not [r for r in self._hosts if r not in self._reports and r != lost]:
                break
            time.sleep(_TICK)


def _is_past(since: float | None, seconds: float) -> bool:
    return since is not None and time.monotonic() - since > seconds
