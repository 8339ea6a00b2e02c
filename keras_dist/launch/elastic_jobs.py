"""With ssh: a job whose hosts come and go, by new starts of all its ranks."""

import secrets
import time
from collections.abc import Callable, Mapping

from keras_dist.launch import processes
from keras_dist.launch.discovery import Discovery
from keras_dist.launch.elastic import SETTLE_SECONDS, left_out_text, start_text
from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import slots
from keras_dist.launch.jobs import run_once
from keras_dist.launch.members import nnodes_text
from keras_dist.launch.ranks import Command
from keras_dist.launch.reach import HostLimits
from keras_dist.launch.restarts import Outcome, Restarts
from keras_dist.launch.signals import stopped_by_signals, stopped_text

_TICK = 0.1

# Seconds between two lines about hosts that are missing.
_SAY_SECONDS = 15.0


def run_elastic(
    command: Command,
    named: Callable[[], Mapping[str, int]],
    limits: HostLimits,
    *,
    restarts: int,
) -> int:
    """Run a command on the hosts that are there, with new starts as they change.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        named: Returns the slots of each host that is named now.
        limits: How many hosts there are, and how they are reached.
        restarts: The largest number of restarts after failures.

    Returns:
        As of `jobs.run_command`.

    Raises:
        TimeoutError: If too few hosts are there.
        ValueError: If a number cannot be used.
    """
    if not 1 <= limits.least <= limits.most or restarts < 0:
        nnodes = nnodes_text(limits.least, limits.most)
        raise ValueError(
            "At least one host is needed, and no negative number of restarts. "
            f"Received: --nnodes {nnodes} --restarts {restarts}"
        )
    job = secrets.token_hex(8)
    # The reaper is forked, so before the first thread.
    with processes.reaper(job), stopped_by_signals() as stopped:
        discovery = Discovery(named, limits.ssh)
        discovery.look()
        discovery.start()
        elastic = _ElasticJob(command, discovery, limits, job, stopped)
        outcome = elastic.run(Restarts(restarts))
    if stopped:
        print_message(stopped_text(stopped[0], has_saved=outcome.has_saved))
        return 128 + stopped[0]
    return outcome.code


class _ElasticJob:
    """One start after the other, each on the hosts that are there then."""

    def __init__(
        self,
        command: Command,
        discovery: Discovery,
        limits: HostLimits,
        job: str,
        stopped: list[int],
    ) -> None:
        self._command, self._discovery, self._limits = command, discovery, limits
        self._job, self._stopped = job, stopped
        self._hosts: dict[str, int] = {}

    def run(self, again: Restarts) -> Outcome:
        """Start again until the job has ended."""
        outcome = Outcome(0)
        while True:
            before = self._hosts
            self._hosts = self._wait()
            if self._stopped:
                return outcome
            text = start_text(
                again.number,
                again.text,
                outcome.why,
                self._hosts,
                before,
                (self._limits.least, self._limits.most),
            )
            print_message(text)
            outcome = run_once(
                self._command,
                slots(list(self._hosts.items())),
                self._job,
                self._limits.reach(list(self._hosts)),
                restart=again.number,
                stopped=self._stopped,
                change=self._change,
            )
            if not outcome.code or self._stopped:
                return outcome
            self._note(outcome)
            if not again.count(is_failure=not outcome.is_change):
                return outcome

    def _note(self, outcome: Outcome) -> None:
        """Remember what has failed."""
        if outcome.failed and self._discovery.left_out.add(outcome.failed):
            print_message(left_out_text(outcome.failed))
        if outcome.lost:
            self._discovery.lose(outcome.lost)

    def _wait(self) -> dict[str, int]:
        """Wait for enough hosts.

        Raises:
            TimeoutError: If there are too few.
        """
        begin = said = time.monotonic()
        while True:
            hosts, came = self._next()
            now = time.monotonic()
            is_settled = now - came > SETTLE_SECONDS or not self._discovery.missing()
            is_settled = is_settled and not self._discovery.is_asking()
            is_full = len(hosts) == self._limits.most
            is_enough = len(hosts) >= self._limits.least and is_settled
            if is_full or is_enough or self._stopped:
                return hosts
            if now - begin > SETTLE_SECONDS and len(hosts) < self._limits.least:
                self._discovery.take_back()
            count = nnodes_text(self._limits.least, self._limits.most)
            missing = self._discovery.missing() or "no others are named"
            text = f"{len(hosts)} of {count} ({', '.join(hosts)}); missing: {missing}"
            if now - begin > self._limits.timeout:
                raise TimeoutError(
                    "Too few hosts are there. Received: "
                    f"{text}, for {self._limits.timeout:g} s."
                )
            if now - said > _SAY_SECONDS:
                said = now
                print_message(f"keras-dist: waiting for hosts: {text}.")
            time.sleep(_TICK)

    def _next(self) -> tuple[dict[str, int], float]:
        """The hosts of the next start, and when the last one came.

        Those of this start come first, in their order: the first one's first rank
        writes the checkpoints.
        """
        hosts, came = self._discovery.available()
        before = [host for host in self._hosts if host in hosts]
        names = list(dict.fromkeys([*before, *hosts]))[: self._limits.most]
        return {host: hosts[host] for host in names}, came

    def _change(self) -> str:
        """Why the hosts of the start should be others than those of now; or empty."""
        hosts, came = self._next()
        gone = [host for host in self._hosts if host not in hosts]
        new = [host for host in hosts if host not in self._hosts]
        other = [h for h in hosts if h in self._hosts and hosts[h] != self._hosts[h]]
        if new and not gone and time.monotonic() - came < SETTLE_SECONDS:
            return ""  # others may come with it
        return "; ".join(
            [f"host {host} leaves" for host in gone]
            + [f"host {host} has come" for host in new]
            + [f"host {host} has other slots" for host in other]
        )
