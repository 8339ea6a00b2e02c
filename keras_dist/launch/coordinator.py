"""Start the ranks of a job on its hosts, watch them, and start them again: one loop.

The coordinator does not know how the hosts were started. `Hosts` is all that it needs
of them: `LocalHost` (`local.py`) runs ranks in this process, `JoinedHosts`
(`joined.py`) gives orders to the agents that have joined the store of the job.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keras_dist.launch.failures import (
    Report,
    blamed,
    ended_on_request,
    print_message,
    ranks_in_words,
    verdict,
)
from keras_dist.launch.hosts import Member, Slot, ranks_of_hosts, slots_of
from keras_dist.launch.processes import SAVED, allow_files, stopped_text
from keras_dist.launch.restarts import SETTLE_SECONDS, Restarts, begin_text, start_text

# Files that are open at once: three pipes of each host, a connection of each rank.
_FILES_OF_RANK = 8

# Of these errors the message is enough.
_NAMED_ERRORS = (ImportError, OSError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Plan:
    """What the user has asked for.

    Args:
        num_hosts: Number of hosts, at most.
        restarts: The largest number of restarts after failures.
        timeout: Seconds to wait for enough hosts.
        meeting: Where the hosts find the store, in words.
        names: Names of all hosts, if they are known.
        saved_code: Exit code when a signal has stopped the job and all ranks have
            saved; `None` for that of the signal.
        min_hosts: Number of hosts, at least; `None` for as many as at most.
        settle: Seconds for which a job that has enough hosts waits for one more.
        is_announced: Whether the user was told already what is started.
    """

    num_hosts: int
    restarts: int = 0
    timeout: float = 0.0
    meeting: str = ""
    names: Sequence[str] = ()
    saved_code: int | None = None
    min_hosts: int | None = None
    settle: float = SETTLE_SECONDS
    is_announced: bool = False

    @property
    def least(self) -> int:
        """Number of hosts, at least."""
        return self.num_hosts if self.min_hosts is None else self.min_hosts

    @property
    def is_elastic(self) -> bool:
        """True if hosts may come and go."""
        return self.least < self.num_hosts


@dataclass(frozen=True)
class End:
    """How a start, or the job, has ended.

    Args:
        code: The exit code.
        text: The message for the user.
        is_host_lost: Whether a host was lost, or could not be reached.
        is_stopped: Whether a signal has ended the job.
        failed: The host that has failed; empty if it is not known.
        is_change: Whether nothing has failed, and the next start has other hosts.
        why: In a few words, what has happened.
    """

    code: int
    text: str = ""
    is_host_lost: bool = False
    is_stopped: bool = False
    failed: str = ""
    is_change: bool = False
    why: str = ""


@dataclass(frozen=True)
class Seen:
    """What was seen of a start, by the ids of its hosts.

    Args:
        reports: The reports that have come.
        lost: What has happened to hosts that were lost, and to those whose agent has
            ended, and the exit code for it; that which was seen first is first.
        change: Why the next start should have other hosts; empty if it should not.
    """

    reports: Mapping[str, Report]
    lost: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    change: str = ""


class Hosts:
    """The hosts of a job."""

    is_local = False  # there is one host, whose name is not worth telling

    def wait(self) -> dict[str, Member] | End | None:
        """Wait for the hosts of the next start.

        Returns:
            The hosts by their ids; `None` if the job was stopped; or how the start has
            ended, if there cannot be one.

        Raises:
            TimeoutError: If some are missing.
        """
        raise NotImplementedError

    def run(
        self, members: Mapping[str, Member], slots: Sequence[Sequence[Slot]], start: int
    ) -> Seen:
        """Run the ranks of a start to their end.

        Args:
            members: What `wait` has returned.
            slots: The slots of each of these hosts.
            start: Number of the start, from 0.
        """
        raise NotImplementedError

    def stopped(self) -> list[tuple[str, int]]:
        """Return the signals that end the job, and the host of each, if it matters."""
        raise NotImplementedError

    def exclude(self, host: str) -> None:
        """Note that a host has failed; one that fails often is left out for a while."""

    def send_end(self, end: End) -> None:
        """Let all hosts know how the job has ended."""


def run_job(hosts: Hosts, plan: Plan) -> End:
    """Run a job to its end, and let all hosts know of it; errors are printed."""
    try:
        end = Coordinator(hosts, plan).run()
    except Exception as error:  # or the hosts would wait forever
        is_named = isinstance(error, _NAMED_ERRORS)
        text = str(error) if is_named else traceback.format_exc()
        end = End(1, f"keras-dist: {text}")
        print_message(end.text)
    hosts.send_end(end)
    return end


class Coordinator:
    """The loop that starts the ranks of a job, again and again.

    Args:
        hosts: The hosts of the job.
        plan: What the user has asked for.
    """

    def __init__(self, hosts: Hosts, plan: Plan) -> None:
        self._hosts, self._plan = hosts, plan
        self._again = Restarts(plan.restarts, is_elastic=plan.is_elastic)

    def run(self) -> End:
        """Start again until the job has ended."""
        before: dict[str, int] = {}
        end = End(0)
        while True:
            found = self._hosts.wait()
            if isinstance(found, End):
                end = found
            elif found is None:
                end = self._stopped_end({}, 0) or End(1)
            else:
                now = ranks_of_hosts(list(found.values()))
                self._announce(end, now, before)
                before = now
                end = self._start(found)
            if end.text:
                print_message(end.text)
            if not end.code or end.is_stopped or not self._has_another(end):
                return end

    def _announce(
        self, end: End, hosts: dict[str, int], before: dict[str, int]
    ) -> None:
        if self._plan.is_elastic:
            limits = self._plan.least, self._plan.num_hosts
            counted, number = self._again.text, self._again.number
            print_message(start_text(number, counted, end.why, hosts, before, limits))
        elif not (self._again.number or self._plan.is_announced):
            print_message(begin_text(hosts))

    def _has_another(self, end: End) -> bool:
        if self._plan.is_elastic and end.failed:
            self._hosts.exclude(end.failed)
        return self._again.another(
            is_failure=not end.is_change,
            is_host_lost=end.is_host_lost,
            is_stopped=lambda: bool(self._hosts.stopped()),
        )

    def _start(self, members: dict[str, Member]) -> End:
        """Start the ranks of these hosts, and wait for their end."""
        slots = slots_of(list(members.values()))
        allow_files(_FILES_OF_RANK * sum(map(len, slots)))
        seen = self._hosts.run(members, slots, self._again.number)
        reports = seen.reports
        if end := self._stopped_end(reports, len(members)):
            return end
        has_all = len(reports) == len(members)
        if has_all and all(report.finished for report in reports.values()):
            return End(0)
        if seen.change and has_all and ended_on_request(reports.values()):
            return End(SAVED, is_change=True, why=seen.change)
        return self._failed_end(members, slots, seen)

    def _failed_end(
        self, members: dict[str, Member], slots: list[list[Slot]], seen: Seen
    ) -> End:
        """Find the first cause: a rank that failed, or what happened to a host."""
        hosts = {name: member.host for name, member in members.items()}
        ranks = {
            name: [slot.rank for slot in own]
            for name, own in zip(members, slots, strict=True)
        }
        causes = [
            (hosts[name], text, code, f"host {hosts[name]} was lost")
            for name, (text, code) in seen.lost.items()
        ]
        for name, host in hosts.items():
            report = seen.reports.get(name)
            no_report = f"host {host} has sent no report"
            no_ranks = f"no ranks could be run on {host}"
            if report is not None and report.error:
                causes.append((host, f"{no_ranks}: {report.error}", 1, no_ranks))
            elif report is None and name not in seen.lost:
                text = f"{no_report} ({ranks_in_words(ranks[name])})."
                causes.append((host, text, 1, no_report))
        by_rank = {
            rank: "" if self._hosts.is_local else hosts[name]
            for name, own in ranks.items()
            for rank in own
        }
        unknown = [
            rank for n, own in ranks.items() if n not in seen.reports for rank in own
        ]
        reports = list(seen.reports.values())
        cause = causes[0] if causes else None
        text, code = verdict(
            reports, cause and cause[1:3], hosts=by_rank, unknown=unknown
        )
        failed, why = blamed(reports, by_rank) or (
            (cause[0], cause[3]) if cause else ("", "")
        )
        return End(
            code,
            text,
            is_host_lost=bool(unknown),
            failed=failed,
            why=why,
        )

    def _stopped_end(self, reports: Mapping[str, Report], num_hosts: int) -> End | None:
        """Return the end of a job that a signal has stopped; `None` if none has."""
        stopped = self._hosts.stopped()
        if not stopped:
            return None
        host, number = stopped[0]
        has_saved = bool(reports) and len(reports) == num_hosts
        has_saved = has_saved and all(report.saved for report in reports.values())
        text = stopped_text(number, has_saved=has_saved, host=host)
        code = self._plan.saved_code if has_saved else None
        return End(code or 128 + number, text, is_stopped=True)
