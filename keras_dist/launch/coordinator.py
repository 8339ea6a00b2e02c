"""In the process of the first host: waits for the hosts, and watches their ranks."""

import dataclasses
import threading
import time

from keras_dist.launch.assignment import seed_of
from keras_dist.launch.elastic import left_out_text, start_text
from keras_dist.launch.failures import print_message
from keras_dist.launch.gathering import TICK, Gathering
from keras_dist.launch.heartbeat import LOST_SECONDS
from keras_dist.launch.hosts import Slot
from keras_dist.launch.meeting import Plan
from keras_dist.launch.members import Member, ranks_of_hosts, slots_of
from keras_dist.launch.rendezvous import Store, secret_of_start
from keras_dist.launch.reports import (
    Report,
    are_asked,
    blamed,
    lost_text,
    report_of,
    verdict,
)
from keras_dist.launch.reports import ranks_in_words as in_words
from keras_dist.launch.restarts import Restarts, begin_text
from keras_dist.launch.signals import SAVED, is_saving, stopped_text

# Seconds in which a host has to end its ranks and report; the second number if they
# may save before.
_STOP_SECONDS, _SAVE_SECONDS = LOST_SECONDS + 2, 45.0


@dataclasses.dataclass(frozen=True)
class _End:
    """How a start, or the job, has ended.

    Args:
        code: The exit code.
        text: The message for the user.
        is_host_lost: Whether a host was lost.
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


@dataclasses.dataclass(frozen=True)
class _Watched:
    """What was seen of a start: the reports, who is lost, and why hosts change."""

    reports: dict[str, Report]
    lost: dict[str, float]
    change: str = ""


class Coordinator(threading.Thread):
    """Starts the ranks of all hosts that have come, watches them, and restarts them.

    It writes an order for each host to the store, and reads there who has come, is
    alive, has reported, or was stopped by a signal.

    Args:
        store: The store of the job.
        secret: Secret of the job.
        plan: What the first host was asked for.
        first: Id of the first host's own member.
    """

    def __init__(self, store: Store, secret: str, plan: Plan, first: str) -> None:
        super().__init__(name="keras_dist.coordinator", daemon=True)
        self._store, self._plan, self._first = store, plan, first
        self._secret = secret
        self._hosts = Gathering(store, secret, plan, first)
        self._nonce = self._hosts.values.nonce

    def run(self) -> None:
        try:
            end = self._job()
        except Exception as error:  # or the hosts would wait for ever
            end = _End(1, f"keras-dist: {error}")
            print_message(end.text)
        self._hosts.send_end(end.code, end.text)

    def _job(self) -> _End:
        again = Restarts(self._plan.restarts)
        before: dict[str, int] = {}
        end = _End(0)
        while True:
            members = self._hosts.wait()
            if members is None:
                end = self._stopped_end({}, 0) or _End(1)
            else:
                hosts = ranks_of_hosts(list(members.values()))
                self._announce(again, end, hosts, before)
                before = hosts
                end = self._run_once(members, again.number)
            if end.text:
                print_message(end.text)
            if not end.code or end.is_stopped or not self._has_another(end, again):
                return end

    def _announce(
        self, again: Restarts, end: _End, hosts: dict[str, int], before: dict[str, int]
    ) -> None:
        """Say which hosts take part in this start, where they come and go."""
        if self._plan.is_elastic:
            limits = self._plan.least, self._plan.num_hosts
            text = start_text(again.number, again.text, end.why, hosts, before, limits)
            print_message(text)
        elif not again.number:
            print_message(begin_text(hosts))

    def _has_another(self, end: _End, again: Restarts) -> bool:
        """Whether there is another start; hosts that have failed may be left out."""
        if not self._plan.is_elastic:
            lost = end.is_host_lost
            return again.wait(
                is_host_lost=lost, is_stopped=lambda: bool(self._hosts.stops())
            )
        first = self._hosts.host_of(self._first)
        if end.failed not in ("", first) and self._hosts.left_out.add(end.failed):
            print_message(left_out_text(end.failed))
        return again.count(is_failure=not end.is_change)

    def _run_once(self, members: dict[str, Member], start: int) -> _End:
        names = list(members)
        slots = slots_of(list(members.values()))
        secret = secret_of_start(self._secret, self._nonce, start)
        self._store.open([slot for own in slots for slot in own], secret)
        reached = [
            m.reached for m in members.values() if not m.reached.startswith("127.")
        ]
        for number, name in enumerate(names):
            self._hosts.order(
                name,
                do="run",
                start=start,
                nonce=self._nonce,
                seed=seed_of(self._nonce),
                number=number,
                slots=[dataclasses.asdict(slot) for slot in slots[number]],
                reached=reached[0] if name == self._first and reached else "",
            )
        seen = self._watch(names, start)
        reports = seen.reports
        if end := self._stopped_end(reports, len(names)):
            return end
        if all(name in reports and reports[name].finished for name in names):
            return _End(0)
        if seen.change and len(reports) == len(names) and are_asked(reports.values()):
            return _End(SAVED, is_change=True, why=seen.change)
        hosts = {slot.rank: slot.host for own in slots for slot in own}
        return self._failed_end(members, slots, seen, hosts)

    def _watch(self, names: list[str], start: int) -> _Watched:
        """Wait for the reports of all hosts; end their ranks if one has failed."""
        reports: dict[str, Report] = {}
        lost: dict[str, float] = {}
        ending: float | None = None
        change = ""
        while silent := [n for n in names if n not in reports and n not in lost]:
            time.sleep(TICK)
            reports |= self._new_reports(silent, start)
            has_looked = self._hosts.look()
            if has_looked and ending is None:
                self._hosts.prepare(names)
            lost |= self._hosts.lost(
                [name for name in silent if name not in reports],
                is_over=self._plan.is_elastic and any(r.code for r in reports.values()),
            )
            stops = self._hosts.stops()
            is_failed = bool(stops or lost) or any(r.code for r in reports.values())
            if ending is None:
                # The ranks of a host that leaves have got the signal already.
                change = self._hosts.leaving()
                if has_looked and not (change or reports or is_failed):
                    change = self._hosts.coming()
            if (is_failed or change) and ending is None:
                saving = is_saving(stops) or (bool(change) and not stops)
                ending = time.monotonic() + (_SAVE_SECONDS if saving else _STOP_SECONDS)
                self._hosts.end_ranks(names, start, is_saving=saving)
            if ending is not None and time.monotonic() > ending:
                break
        return _Watched(reports, lost, change)

    def _new_reports(self, silent: list[str], start: int) -> dict[str, Report]:
        """Reports of this start that have come from these hosts."""
        found = {}
        for key, values in self._hosts.values.of_kind("report").items():
            number, _, name = key.partition(".")
            if number == str(start) and name in silent:
                found[name] = report_of(values)
        return found

    def _failed_end(
        self,
        members: dict[str, Member],
        slots: list[list[Slot]],
        seen: _Watched,
        hosts: dict[int, str],
    ) -> _End:
        cause, why, failed = None, "", ""
        reports = seen.reports
        unknown: list[int] = []
        for (name, member), own in zip(members.items(), slots, strict=True):
            ranks = [slot.rank for slot in own]
            if name not in reports:
                unknown += ranks
            found = _lost(member.host, ranks, reports.get(name), seen.lost.get(name))
            if found and not cause:
                (text, why), failed = found, member.host
                cause = text, 1
        failed, why = blamed(reports.values(), hosts) or (failed, why)
        text, code = verdict(
            list(reports.values()), cause, hosts=hosts, unknown=unknown
        )
        lost = bool(unknown)
        return _End(code, text, is_host_lost=lost, failed=failed, why=why)

    def _stopped_end(self, reports: dict[str, Report], num_hosts: int) -> _End | None:
        """The end of a job that a signal has stopped; `None` if none has."""
        stopped = self._hosts.stopped()
        if not stopped:
            return None
        name, number = stopped[0]
        has_saved = bool(reports) and len(reports) == num_hosts
        has_saved = has_saved and all(report.saved for report in reports.values())
        host = self._hosts.host_of(name)
        text = stopped_text(number, has_saved=has_saved, host=host)
        code = self._plan.saved_code if has_saved else 128 + number
        return _End(code or 128 + number, text, is_stopped=True)


def _lost(
    host: str, ranks: list[int], report: Report | None, lost: float | None
) -> tuple[str, str] | None:
    """What has happened to a host itself, at length and in a few words."""
    if report is None:
        silent = f"host {host} has sent no report ({in_words(ranks)})."
        if lost is not None:
            return lost_text(host, ranks, lost), f"host {host} was lost"
        return silent, f"host {host} has sent no report"
    if report.error:
        text = f"no ranks could be run on {host}: {report.error}"
        return text, f"no ranks could be run on {host}"
    return None
