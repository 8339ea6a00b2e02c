"""A function that ranks call which another system has started: Ray or Spark.

Here is the driver's side: the store of a start, who has failed, and what the caller
gets. `call_agent` is the side of the workers.
"""

import contextlib
import json
import pickle
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_dist.launch.failures import (
    LOST_SECONDS,
    Report,
    first_of,
    report_of,
    verdict,
)
from keras_dist.launch.function import pickled_call
from keras_dist.launch.heartbeat import Presence
from keras_dist.launch.ranks import seed_of
from keras_dist.launch.store import Store, StoreClient, client_of

# The names in the store: what the driver asks all agents for, and what each agent says
# of itself, with its rank behind it.
STOP, SAVE = "stop", "save"
HOST, LEFT, REPORT = "name", "left", "host"

_UNKNOWN = "an unknown host"

# What `run_agent` raises behind the number of its rank.
LOST_AGENT = "has lost its agent"
NO_PACKAGE = "has no keras_dist in its Python"
_FOUND = re.compile(rf"rank (\d+) ({LOST_AGENT}|{NO_PACKAGE}, \S+)")

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
        function, args, kwargs: What the ranks call; see `keras_dist.run`.
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
        secret, job = secrets.token_hex(16), secrets.token_hex(8)
        try:
            address = socket.gethostbyname(address)
            self._server = Store(address)
        except OSError as error:
            raise ValueError(
                "The workers have to reach the store of the job on the driver's host. "
                f"Received: the address {address}, where it cannot listen ({error})."
            ) from error
        self._server.open([], secret)
        variables = self._server.variables(secret)
        # What each agent needs; `hosts`, of all workers, and `worker` are to be added.
        # It contains the job's secret.
        self.header: dict[str, Any] = {
            "store": variables,
            "secret": secret,
            "job": job,
            "seed": seed_of(job),
            "address": address,
            "restart": restart,
            "environment": dict(environment or {}),
        }
        store = client_of(variables)
        assert store is not None
        self._store = store
        self._presence = Presence(store)
        # By rank, as they come in.
        self._hosts: dict[int, str] = {}
        self._reports: dict[int, Report] = {}
        # The first actor or task that has ended too early, and what happened to it; and
        # why the system of the workers has ended the job.
        self._cause: tuple[int, str] | None = None
        self._reason = ""
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self.is_saving = False  # the agents were asked to let the ranks save, and end

    def close(self) -> None:
        """End the store."""
        self._server.close()

    def look(self) -> None:
        """Read what the agents have written; ask all to stop if one has failed."""
        running = [rank for rank in range(self._size) if rank not in self._reports]
        for rank in running:
            if rank not in self._hosts and (host := self._store.get(f"{HOST}.{rank}")):
                self._hosts[rank] = host
            if not self.is_stopping and self._store.get(f"{LEFT}.{rank}"):
                self.lose(rank, "was killed")
        self._reports |= read_reports(self._store, self._size)
        running = [rank for rank in running if rank not in self._reports]
        names = [str(rank) for rank in running]
        self._presence.look(names)
        for name in self._presence.lost(names):
            self.lose(int(name), f"does not answer since {LOST_SECONDS:g} s")
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
        """Return whether all agents have answered."""
        return all(self._presence.has_answered(str(r)) for r in range(self._size))

    def results(self, answers: Sequence[bytes]) -> list[Any]:
        """Return what each rank returned, by rank.

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
        self._raise_first(found)
        return [pickle.loads(found[rank]) for rank in range(self._size)]

    def _settle(self) -> None:
        """Wait, for some seconds, until the agents that run have reported."""
        lost = self._cause[0] if self._cause and self._cause[1] == LOST_AGENT else -1
        while not _is_past(self._stopped_at, _REPORT_SECONDS):
            self.look()
            if not [r for r in self._hosts if r not in self._reports and r != lost]:
                break
            time.sleep(_TICK)

    def _raise_first(self, found: Mapping[int, bytes]) -> None:
        """Raise the first error, if there is one.

        Args:
            found: What each rank returned, or else its error, pickled; of the agents
                that have answered.
        """
        known = {rank: self._hosts.get(rank, _UNKNOWN) for rank in range(self._size)}
        for rank, report in self._reports.items():
            if report.error:
                raise RuntimeError(
                    "A rank could not be started. "
                    f"Received: rank {rank} on {known[rank]}: {report.error}"
                )
        reports = list(self._reports.values())
        failures = first_of([each for report in reports for each in report.failures])
        lost = self._lost_text(known)
        if not failures and lost is None:
            return
        text, _ = verdict(
            reports,
            None if lost is None else (lost, 1),
            hosts=known,
            unknown=[rank for rank in known if rank not in self._reports],
        )
        error = None
        if failures and (lost is None or not failures[0].is_secondary):
            error = error_in(found.get(failures[0].rank, b""))
        if error is None:
            raise RuntimeError(text)
        raise error from RuntimeError(text)

    def _lost_text(self, known: Mapping[int, str]) -> str | None:
        """Describe what has happened, if it was not in a rank."""
        if self._cause is None and not self._reason:
            return None
        reason = f" ({self._reason})" if self._reason else ""
        if self._cause is None:
            return f"each {self._system} was ended before its rank{reason}."
        rank, text = self._cause
        return f"the {self._system} of rank {rank} on {known[rank]} {text}{reason}."


def read_reports(store: StoreClient, size: int) -> dict[int, Report]:
    """Return the reports that agents have sent, by rank.

    Args:
        store: The store of the job.
        size: Number of ranks.
    """
    found = store.get_all(f"{REPORT}.") or {}
    reports = {}
    for rank in range(size):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            reports[rank] = report_of(found[f"{REPORT}.{rank}"])  # else it is no report
    return reports


def cause_in(text: str) -> tuple[int, str] | None:
    """Find the rank and the cause that `run_agent` has raised, in a message.

    >>> cause_in("Job aborted: RuntimeError: rank 3 has lost its agent")
    (3, 'has lost its agent')
    """
    found = _FOUND.search(text)
    return None if found is None else (int(found[1]), found[2])


def error_in(outcome: bytes) -> Exception | None:
    """Return the error of a rank, if it could be pickled and can be loaded here.

    Args:
        outcome: What the rank has left: its pickled error.
    """
    try:
        error = pickle.loads(outcome)
    except Exception:  # whatever loading an object of the user's raises
        return None
    return error if isinstance(error, Exception) else None


def _is_past(since: float | None, seconds: float) -> bool:
    return since is not None and time.monotonic() - since > seconds
