"""In the process of the first host: who has come, and what each host has to do."""

import time
from collections.abc import Sequence
from typing import Any

from keras_dist.launch.elastic import (
    LeftOut,
    left_out_text,
    taken_back_text,
    waiting_text,
)
from keras_dist.launch.failures import print_message
from keras_dist.launch.heartbeat import LOST_SECONDS, Presence
from keras_dist.launch.host_store import FirstHostStore
from keras_dist.launch.meeting import Plan
from keras_dist.launch.members import Member, nnodes_text, numbered
from keras_dist.launch.rendezvous import Store
from keras_dist.launch.signals import is_saving, stopped_text
from keras_dist.version import __version__

TICK = 0.1

# Seconds between two looks at who is there while ranks run, and between two lines about
# hosts that are missing.
_LOOK_SECONDS, _SAY_SECONDS = 0.5, 15.0

# Seconds of silence after which a host is lost where all others have ended already;
# and after which the others prepare for a start without it.
_SILENT_SECONDS = 5.0

# Seconds for which the store stays until all hosts have seen the end.
_LEAVE_SECONDS = 10.0


class Gathering:
    """The hosts of a job as the first one sees them, through its store.

    Args:
        store: The store of the job.
        secret: Secret of the job.
        plan: What the first host was asked for.
        first: Id of the first host's own member.
    """

    def __init__(self, store: Store, secret: str, plan: Plan, first: str) -> None:
        self.values = FirstHostStore(store, secret)
        self.left_out = LeftOut()
        self._presence = Presence[str](self.values)
        self._plan, self._first = plan, first
        self._chosen: list[str | None] = []
        # Hosts that were lost sooner than 15 s after their last heartbeat.
        self._lost: set[str] = set()
        # All hosts that have ever come, and when the last one came.
        self._known: set[str] = set()
        self._came = self._looked = 0.0

    def wait(self) -> dict[str, Member] | None:
        """Wait until there are enough hosts; `None` if the job was stopped.

        Raises:
            TimeoutError: If some are missing.
        """
        begin = said = time.monotonic()
        while not self.stops():
            self._dismiss()
            members = self._members()
            numbers = numbered(members, self._plan.num_hosts, self._chosen)
            chosen = {name: members[name] for name in numbers if name is not None}
            if self._is_enough(len(chosen)):
                self._chosen = numbers
                return chosen
            now = time.monotonic()
            if now - begin > self._plan.settle and len(chosen) < self._plan.least:
                self._take_back()
            text = self._missing(members, numbers)
            if now - begin > self._plan.timeout and len(chosen) < self._plan.least:
                raise TimeoutError(
                    f"Not all hosts have come within {self._plan.timeout:g} s. "
                    f"Received: {text}. Start the same command on each of them; "
                    f"each has to reach {self._plan.meeting}."
                )
            if now - said > _SAY_SECONDS:
                said = now
                print_message(f"keras-dist: waiting for hosts: {text}.")
            time.sleep(TICK)
        return None

    def look(self) -> bool:
        """Read the heartbeats of all hosts, not too often; whether it was done."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        self._presence.look(list(self.values.of_kind("join")))
        return True

    def lost(self, names: Sequence[str], *, is_over: bool = False) -> dict[str, float]:
        """Those of these hosts that are lost, and for how many seconds at least.

        Args:
            names: Ids of the hosts.
            is_over: Whether all others have ended their ranks already, as they do when
                one host is gone. Then a shorter silence is enough.
        """
        seconds = _SILENT_SECONDS if is_over else LOST_SECONDS
        found = self._presence.lost(names, seconds)
        self._lost |= set(found)
        return dict.fromkeys(found, seconds)

    def prepare(self, names: Sequence[str]) -> None:
        """While one of these hosts is silent, let them prepare for another start.

        Args:
            names: Ids of the hosts of a start, whose ranks run.
        """
        if not self._plan.is_elastic:
            return
        is_near = bool(self._presence.lost(names, _SILENT_SECONDS))
        if self._order(names[0]).get("is_start_near", False) != is_near:
            for name in names:
                self.order(name, **self._order(name) | {"is_start_near": is_near})

    def leaving(self) -> str:
        """The hosts of the start that leave it, in words; empty if none does."""
        names = [name for name in self._leaving() if name in self._chosen]
        return "; ".join(f"host {self.host_of(name)} leaves" for name in names)

    def coming(self) -> str:
        """The hosts that have come since the start, in words; empty if none has."""
        if not self._plan.is_elastic:
            return ""
        self._dismiss(self._chosen)
        members = self._members()
        numbers = numbered(members, self._plan.num_hosts, self._chosen)
        for name in set(members) - set(numbers) - set(self._chosen):
            self.order(name, do="wait", text=waiting_text(self._plan.num_hosts))
        new = [name for name in numbers if name and name not in self._chosen]
        if not new or time.monotonic() - self._came < self._plan.settle:
            return ""
        return "; ".join(f"host {members[name].host} has come" for name in new)

    def _is_enough(self, count: int) -> bool:
        """Whether a job could start, or is not to wait for more hosts."""
        has_settled = time.monotonic() - self._came >= self._plan.settle
        return count == self._plan.num_hosts or (
            has_settled and count >= self._plan.least
        )

    def _missing(self, members: dict[str, Member], numbers: list[str | None]) -> str:
        """Who is there, and who is missing."""
        there = [members[name].host for name in numbers if name is not None]
        away = [number for number, name in enumerate(numbers) if name is None]
        known = [self._plan.names[number] for number in away if self._plan.names]
        named = known or [f"node rank {number}" for number in away]
        count = nnodes_text(self._plan.min_hosts, self._plan.num_hosts)
        text = f"{len(there)} of {count} ({', '.join(there)})"
        if self._plan.is_elastic:
            return f"{text}; missing: {self._plan.least - len(there)}{self._out(there)}"
        return f"{text}; missing: {', '.join(named)}"

    def _out(self, there: Sequence[str]) -> str:
        """The hosts that have been there before, in words."""
        hosts = {member["host"] for member in self.values.of_kind("join").values()}
        named = []
        for host in sorted(hosts - set(there)):
            left = self.left_out.seconds(host)
            named.append(f"{host}, left out for {left:.0f} s" if left else host)
        return f"; was there before: {'; '.join(named)}" if named else ""

    def _members(self) -> dict[str, Member]:
        """The hosts that may take part, in the order in which they came."""
        found = self.values.of_kind("join")
        gone = self._gone(list(found))
        members = {n: Member(**found[n]) for n in found if n not in gone}
        for name, member in list(members.items()):
            if not self._agrees(name, member) or self._waits(name, member):
                del members[name]
        if set(members) - self._known:
            self._known |= set(members)
            self._came = time.monotonic()
        return members

    def _gone(self, came: Sequence[str]) -> set[str]:
        """Those of the hosts that have come that have left since, or are lost."""
        gone = {**self.values.of_kind("left"), **self.values.of_kind("stopped")}
        names = [name for name in came if name not in gone]
        self._presence.look(names)
        self._lost &= set(self._presence.lost(names, _SILENT_SECONDS))
        return {*gone, *self._lost, *self._presence.lost(names)}

    def _agrees(self, name: str, member: Member) -> bool:
        """Whether a host expects the same job; one that does not has to end."""
        nnodes = nnodes_text(self._plan.min_hosts, self._plan.num_hosts)
        if (member.nnodes, member.version) == (nnodes, __version__):
            return True
        text = (
            "keras-dist: the hosts of a job have to agree on `--nnodes` and on the "
            f"version of keras_dist. Received: {member.nnodes} and {member.version} "
            f"here, {nnodes} and {__version__} on the first host."
        )
        self.order(name, do="exit", code=1, text=text)
        return False

    def _waits(self, name: str, member: Member) -> bool:
        """Whether a host is left out, which lets it wait."""
        if name == self._first or not self.left_out.seconds(member.host):
            return False
        self.order(name, do="wait", text=left_out_text(member.host))
        return True

    def _take_back(self) -> None:
        """Let a host that is left out take part again, if there is one."""
        found = self.values.of_kind("join")
        there = [name for name in found if name not in self._gone(list(found))]
        host = self.left_out.take_back(found[name]["host"] for name in there)
        if host:
            print_message(taken_back_text(host))

    def host_of(self, name: str) -> str:
        """The host of a member, by its id."""
        return str((self.values.get(f"join.{name}") or {})["host"])

    def stops(self) -> list[int]:
        """Numbers of the signals that end the job."""
        return [number for _, number in self.stopped()]

    def stopped(self) -> list[tuple[str, int]]:
        """The hosts of the job that have received a signal for it, and its number."""
        found = self.values.of_kind("stopped")
        known = {self._first, *self._chosen} - set(self._leaving())
        return [(name, number) for name, number in found.items() if name in known]

    def _leaving(self) -> list[str]:
        """Hosts that a signal asks to leave a job that goes on without them."""
        if not self._plan.is_elastic:
            return []
        found = self.values.of_kind("stopped")
        return [
            name
            for name, number in found.items()
            if is_saving([number]) and name != self._first
        ]

    def _dismiss(self, running: Sequence[str | None] = ()) -> None:
        """Let the hosts go that leave the job, but for those with ranks that run."""
        found = self.values.of_kind("stopped")
        left = self.values.of_kind("left")
        for name in self._leaving():
            if name not in left and name not in running:
                host = self.host_of(name)
                text = stopped_text(found[name], has_saved=False, host=host)
                text = f"{text} The job goes on without this host."
                self.order(name, do="exit", code=128 + found[name], text=text)

    def end_ranks(self, names: Sequence[str], start: int, *, is_saving: bool) -> None:
        """Let hosts end the ranks of a start, at once or when they have saved."""
        for name in names:
            self.order(name, do="save" if is_saving else "stop", start=start)

    def order(self, name: str, **values: Any) -> None:
        """Write what a host has to do now."""
        self.values.put(f"order.{name}", values)

    def _order(self, name: str) -> dict[str, Any]:
        """What a host has to do now."""
        return self.values.get(f"order.{name}") or {}

    def send_end(self, code: int, text: str) -> None:
        """Let all hosts end, and wait until they have seen it.

        Args:
            code: The exit code of the job.
            text: The message, which the first host has printed.
        """
        found = self.values.of_kind("join")
        first = self._plan.meeting.partition(":")[0]
        for name, member in found.items():
            line = text.partition("\n")[0]
            if name == self._first or member["is_quiet"]:
                line = ""  # it is on this screen already
            elif line != text:
                line = f"{line} All of it is in the output of {first}."
            self.order(name, do="exit", code=code, text=line)
        begin = time.monotonic()
        while time.monotonic() - begin < _LEAVE_SECONDS:
            left = self.values.of_kind("left")
            staying = [name for name in found if name not in left]
            self._presence.look(staying)
            if not set(staying) - set(self._presence.lost(staying)) - self._lost:
                return
            time.sleep(TICK)
