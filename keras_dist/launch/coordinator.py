"""In the process of the first host: waits for the hosts, and watches their ranks."""

import dataclasses
import secrets
import threading
import time

from keras_dist.launch.failures import print_message
from keras_dist.launch.gathering import TICK, Gathering, Plan
from keras_dist.launch.heartbeat import LOST_SECONDS
from keras_dist.launch.hosts import Slot
from keras_dist.launch.members import Member, slots_of
from keras_dist.launch.rendezvous import Store, secret_of_start
from keras_dist.launch.reports import Report, lost_text, report_of, verdict
from keras_dist.launch.restarts import Restarts
from keras_dist.launch.signals import is_saving, stopped_text

# Seconds in which a host has to end its ranks and report; the second number if they
# may save before.
_STOP_SECONDS, _SAVE_SECONDS = LOST_SECONDS + 2, 45.0


@dataclasses.dataclass(frozen=True)
class _End:
    """How a start, or the job, has ended: exit code and message."""

    code: int
    text: str = ""
    is_host_lost: bool = False
    is_stopped: bool = False


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
        self._secret, self._nonce = secret, secrets.token_hex(16)
        self._hosts = Gathering(store, secret, plan, first)

    def run(self) -> None:
        try:
            end = self._job()
        except Exception as error:  # or the hosts would wait for ever
            end = _End(1, f"keras-dist: {error}")
            print_message(end.text)
        self._hosts.send_end(end.code, end.text)

    def _job(self) -> _End:
        again = Restarts(self._plan.restarts)
        while True:
            members = self._hosts.wait()
            if members is None:
                end = self._stopped_end({}, 0) or _End(1)
            else:
                end = self._run_once(members, again.number)
            if end.text:
                print_message(end.text)
            if not end.code or end.is_stopped:
                return end
            if not again.wait(
                is_host_lost=end.is_host_lost,
                is_stopped=lambda: bool(self._hosts.stops()),
            ):
                return end

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
                number=number,
                slots=[dataclasses.asdict(slot) for slot in slots[number]],
                reached=reached[0] if name == self._first and reached else "",
            )
        reports, lost = self._watch(names, start)
        if end := self._stopped_end(reports, len(names)):
            return end
        hosts = {slot.rank: slot.host for own in slots for slot in own}
        if all(name in reports and not reports[name].code for name in names):
            return _End(0)
        return self._failed_end(members, slots, reports, lost, hosts)

    def _watch(
        self, names: list[str], start: int
    ) -> tuple[dict[str, Report], set[str]]:
        """Wait for the reports of all hosts; end their ranks if one has failed."""
        reports: dict[str, Report] = {}
        lost: set[str] = set()
        ending: float | None = None
        while set(names) - set(reports) - lost:
            time.sleep(TICK)
            for key, values in self._hosts.values.of_kind("report").items():
                number, _, name = key.partition(".")
                if number == str(start) and name not in reports:
                    reports[name] = report_of(values)
            silent = [name for name in names if name not in reports]
            self._hosts.presence.look(names)
            lost |= set(self._hosts.presence.lost(silent))
            stops = self._hosts.stops()
            is_failed = bool(stops or lost) or any(r.code for r in reports.values())
            if is_failed and ending is None:
                saving = is_saving(stops)
                ending = time.monotonic() + (_SAVE_SECONDS if saving else _STOP_SECONDS)
                for name in names:
                    self._hosts.order(
                        name, do="save" if saving else "stop", start=start
                    )
            if ending is not None and time.monotonic() > ending:
                break
        return reports, lost

    def _failed_end(
        self,
        members: dict[str, Member],
        slots: list[list[Slot]],
        reports: dict[str, Report],
        lost: set[str],
        hosts: dict[int, str],
    ) -> _End:
        cause = None
        unknown: list[int] = []
        for (name, member), own in zip(members.items(), slots, strict=True):
            ranks = [slot.rank for slot in own]
            if name not in reports:
                unknown += ranks
                cause = cause or (lost_text(member.host, ranks), 1)
            elif reports[name].error:
                why = reports[name].error
                cause = f"no ranks could be run on {member.host}: {why}", 1
        text, code = verdict(
            list(reports.values()), cause, hosts=hosts, unknown=unknown
        )
        return _End(code, text, is_host_lost=bool(unknown))

    def _stopped_end(self, reports: dict[str, Report], num_hosts: int) -> _End | None:
        """The end of a job that a signal has stopped; `None` if none has."""
        stopped = self._hosts.stopped()
        if not stopped:
            return None
        name, number = stopped[0]
        has_saved = bool(reports) and len(reports) == num_hosts
        has_saved = has_saved and all(report.saved for report in reports.values())
        host = self._hosts.values.get(f"join.{name}")["host"]
        text = stopped_text(number, has_saved=has_saved, host=host)
        code = self._plan.saved_code if has_saved else 128 + number
        return _End(code or 128 + number, text, is_stopped=True)
