"""Hosts whose agents have joined the store of a job: who is there, and their orders.

In the store, with ID the id of an agent: `join.ID` describes the host; `beat.ID` is its
heartbeat; `order.ID` is what it has to do; `report.START.ID` is how its ranks have
ended; `stopped.ID` is a signal that it has received; `left.ID` says that it has ended.
"""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keras_dist.launch.coordinator import End, Hosts, Plan, Seen
from keras_dist.launch.failures import (
    LOST_SECONDS,
    Report,
    lost_text,
    print_message,
    ranks_in_words,
    report_of,
)
from keras_dist.launch.hosts import Member, Slot, nnodes_text, numbered
from keras_dist.launch.processes import is_saving, stopped_text
from keras_dist.launch.ranks import seed_of
from keras_dist.launch.restarts import (
    LeftOut,
    left_out_text,
    taken_back_text,
    waiting_text,
)
from keras_dist.launch.store import (
    OwnStoreClient,
    Store,
    StoreClient,
    secret_of_start,
)
from keras_dist.version import __version__

_TICK = 0.1

# Seconds between two looks at who is there while ranks run, and between two lines about
# hosts that are missing.
_LOOK_SECONDS, _SAY_SECONDS = 0.5, 15.0

# Between two looks at the heartbeats; more means that this machine was suspended.
_LONGEST_LOOK = 5.0

# Seconds in which a host has to end its ranks and report; the second number if they
# may save before.
_STOP_SECONDS, _SAVE_SECONDS = LOST_SECONDS + 2, 45.0

# Seconds of silence after which a host is lost where all others have ended already.
_SILENT_SECONDS = 5.0

# Seconds for which the store stays until all hosts have seen the end.
_LEAVE_SECONDS = 10.0


class Presence:
    """In the launcher: when each agent's last heartbeat was seen.

    Args:
        store: The store of the job.
    """

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._begin = self._looked = time.monotonic()
        # For each agent that has answered: its last heartbeat, and when it was seen.
        self._seen: dict[str, tuple[int, float]] = {}
        self._has_warned = False

    def look(self, running: Sequence[str]) -> None:
        """Read the heartbeats of agents that run, twice a second."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        pause = now - self._looked
        if pause > _LONGEST_LOOK:
            self._seen = {k: (n, t + pause) for k, (n, t) in self._seen.items()}
        self._looked = now
        found = self._store.get_all("beat.") or {}  # one request, however many hosts
        for number in running:
            beats = found.get(f"beat.{number}")
            if beats is not None and self._seen.get(number, (0, 0.0))[0] != beats:
                self._seen[number] = beats, now

    def lost(self, running: Sequence[str], seconds: float = LOST_SECONDS) -> list[str]:
        """Return the agents that run, as far as is known, but were silent so long."""
        return [
            number
            for number in running
            if number in self._seen and self._looked - self._seen[number][1] > seconds
        ]

    def late(self, running: Sequence[str]) -> list[str]:
        """Return, once, the agents that have not answered 15 s after the start."""
        if self._has_warned or time.monotonic() - self._begin < LOST_SECONDS:
            return []
        self._has_warned = True
        return [number for number in running if number not in self._seen]


class Starter:
    """Gets an agent running on each host, and says which hosts there are.

    This one does nothing: somebody else starts the same command on each host. To
    support another system, override what it can do or knows.
    """

    def look(self, joined: Collection[str], *, is_between_starts: bool) -> None:
        """Start agents that are missing, and note those that have ended.

        Args:
            joined: Ids of the agents that have joined the store.
            is_between_starts: Whether no ranks run, so that agents that nobody needs
                any more can be ended.
        """

    def pause(self, seconds: float) -> None:
        """Wait for so long, and pass on what the agents print."""
        time.sleep(seconds)

    def ordered(
        self, members: Mapping[str, Member], plan: Plan, before: Sequence[str | None]
    ) -> list[str | None]:
        """Return the ids of the members by their numbers; `None` where one is missing.

        Args:
            members: The members that may take part, in the order in which they came.
            plan: What the user has asked for.
            before: The order of the last start.
        """
        return numbered(members, plan.num_hosts, before)

    def members(self, members: dict[str, Member]) -> dict[str, Member]:
        """Return the members that the user still names, with their numbers of ranks."""
        return members

    def failed(self) -> End | None:
        """Return why the next start cannot be, if an agent could not be started."""
        return None

    def ended(self) -> Mapping[str, int]:
        """Return the exit codes of agents that have ended, by their ids."""
        return {}

    def ended_text(self, name: str, host: str, ranks: Sequence[int], code: int) -> str:
        """Describe an agent that has ended while its ranks ran."""
        return (
            f"the agent on {host} was killed, or the connection to it was lost, while "
            f"{ranks_in_words(ranks)} ran: exit code {code}."
        )

    def waits(self) -> bool | None:
        """Return whether more hosts will soon be there; `None` if nobody knows."""
        return None

    def changes(self, members: Mapping[str, Member]) -> list[str]:
        """Return why the hosts of a start, which are these, should be others."""
        return []

    def late_agents(self) -> dict[str, str]:
        """Return the hosts of agents that should have joined by now, by their ids."""
        return {}

    def named(self) -> tuple[Collection[str], str] | None:
        """Return the hosts that the user names, and what is wrong with their names.

        `None` if this is not known.
        """
        return None

    def lose(self, names: Collection[str]) -> None:
        """End the agents that do not answer any more."""


class JoinedHosts(Hosts):
    """The hosts of a job, through its store.

    Args:
        store: The store of the job.
        secret: Secret of the job.
        plan: What the user has asked for.
        first: Id of the agent in this process; empty if there is none.
        starter: What starts the agents.
        stopped: Numbers of the signals that this process has received, if it has no
            agent.
    """

    def __init__(
        self,
        store: Store,
        secret: str,
        plan: Plan,
        *,
        first: str = "",
        starter: Starter | None = None,
        stopped: Sequence[int] = (),
    ) -> None:
        self.values = OwnStoreClient(store, secret)
        self.left_out = LeftOut()
        self._store, self._secret, self._plan = store, secret, plan
        self._first, self._stopped = first, stopped
        self._starter = starter or Starter()
        self._presence = Presence(self.values)
        self._chosen: list[str | None] = []
        self._running: Mapping[str, Member] = {}
        # Hosts that were lost sooner than 15 s after their last heartbeat.
        self._lost: set[str] = set()
        # All hosts that have ever come, and when the last one came.
        self._known: set[str] = set()
        self._came = self._looked = 0.0

    def wait(self) -> dict[str, Member] | End | None:
        begin = said = time.monotonic()
        while not self.stopped():
            self._starter.look(self._known, is_between_starts=True)
            if end := self._starter.failed():
                return end
            self._dismiss()
            members = self._members()
            numbers = self._starter.ordered(members, self._plan, self._chosen)
            chosen = {name: members[name] for name in numbers if name is not None}
            if self._is_enough(len(chosen)):
                self._chosen = numbers
                return chosen
            now = time.monotonic()
            is_short = len(chosen) < self._plan.least
            if now - begin > self._plan.settle and is_short:
                self._take_back()
            text = self._missing(members, numbers)
            if now - begin > self._plan.timeout and is_short:
                raise TimeoutError(self._late_text(text))
            if now - said > _SAY_SECONDS:
                said = now
                print_message(f"keras-dist: waiting for hosts: {text}.")
            for host in self._late_hosts():
                print_message(
                    f"keras-dist: {host} has not answered yet; still waiting for its "
                    "agent."
                )
            self._starter.pause(_TICK)
        return None

    def run(
        self, members: Mapping[str, Member], slots: Sequence[Sequence[Slot]], start: int
    ) -> Seen:
        self._running, nonce = members, self.values.nonce
        secret = secret_of_start(self._secret, nonce, start)
        self._store.open([slot for own in slots for slot in own], secret)
        reached = [
            m.reached for m in members.values() if not m.reached.startswith("127.")
        ]
        for name, own in zip(members, slots, strict=True):
            self._order(
                name,
                do="run",
                start=start,
                nonce=nonce,
                seed=seed_of(nonce),
                slots=[dataclasses.asdict(slot) for slot in own],
                reached=reached[0] if reached else "",
            )
        ranks = {
            name: [slot.rank for slot in own]
            for name, own in zip(members, slots, strict=True)
        }
        return self._watch(ranks, start)

    def stopped(self) -> list[tuple[str, int]]:
        if self._stopped:
            return [("", number) for number in self._stopped]
        found = self.values.of_kind("stopped")
        known = {self._first, *self._chosen} - set(self._leaving())
        return [(self._host_of(n), number) for n, number in found.items() if n in known]

    def exclude(self, host: str) -> None:
        first = self._host_of(self._first) if self._first else ""
        if host != first and self.left_out.add(host):
            print_message(left_out_text(host))

    def send_end(self, end: End) -> None:
        """Let all hosts end, and wait until they have seen it."""
        found = self.values.of_kind("join")
        first = self._plan.meeting.partition(":")[0]
        for name, member in found.items():
            line = end.text.partition("\n")[0]
            if name == self._first or member["is_quiet"]:
                line = ""  # it is on this screen already
            elif line != end.text:
                line = f"{line} All of it is in the output of {first}."
            self._order(name, do="exit", code=end.code, text=line)
        begin = time.monotonic()
        while time.monotonic() - begin < _LEAVE_SECONDS:
            gone = {**self.values.of_kind("left"), **self._starter.ended()}
            staying = [name for name in found if name not in gone]
            self._presence.look(staying)
            if not set(staying) - set(self._presence.lost(staying)) - self._lost:
                return
            self._starter.pause(_TICK)

    def _watch(self, ranks: Mapping[str, Sequence[int]], start: int) -> Seen:
        """Wait for the reports of all hosts; end their ranks if one has failed.

        Args:
            ranks: The ranks of each host, by its id.
            start: Number of the start.
        """
        names = list(ranks)
        reports: dict[str, Report] = {}
        lost: dict[str, tuple[str, int]] = {}
        ending: float | None = None
        change = ""
        while silent := [n for n in names if n not in reports and n not in lost]:
            self._starter.pause(_TICK)
            self._starter.look(self._known, is_between_starts=False)
            codes = self._starter.ended()
            reports |= self._new_reports(silent, start)
            silent = [name for name in silent if name not in reports]
            for name, code in codes.items():
                if name in silent:
                    host = self._host_of(name)
                    text = self._starter.ended_text(name, host, ranks[name], code)
                    lost[name] = text, code or 1
            has_looked = self._look()
            has_failures = any(report.code for report in reports.values())
            is_over = self._plan.is_elastic and has_failures
            for name, seconds in self._newly_lost(silent, is_over=is_over).items():
                host = self._host_of(name)
                text = lost_text(host, ranks[name], seconds)
                lost.setdefault(name, (text, 1))
            stops = [number for _, number in self.stopped()]
            is_failed = bool(stops or lost) or has_failures
            if ending is None:
                # The ranks of a host that leaves have got the signal already.
                change = self._leaving_text()
                if has_looked and not (change or reports or is_failed):
                    change = self._change_text()
            if (is_failed or change) and ending is None:
                saving = is_saving(stops) or (bool(change) and not stops)
                ending = time.monotonic() + (_SAVE_SECONDS if saving else _STOP_SECONDS)
                for name in names:
                    self._order(name, do="save" if saving else "stop", start=start)
            if ending is not None and time.monotonic() > ending:
                break
        self._starter.lose([name for name in names if name not in reports])
        return Seen(reports, lost, change)

    def _new_reports(self, silent: Collection[str], start: int) -> dict[str, Report]:
        """Return the reports of this start that have come from these hosts."""
        found = {}
        for key, values in self.values.of_kind("report").items():
            number, _, name = key.partition(".")
            if number == str(start) and name in silent:
                with contextlib.suppress(
                    KeyError, TypeError, ValueError, AttributeError
                ):
                    found[name] = report_of(values)  # else it is no report
        return found

    def _look(self) -> bool:
        """Read the heartbeats of all hosts, not too often; whether it was done."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        self._presence.look(list(self.values.of_kind("join")))
        return True

    def _newly_lost(self, names: Sequence[str], *, is_over: bool) -> dict[str, float]:
        """Return which of these hosts are lost, and for how many seconds at least.

        Args:
            names: Ids of the hosts.
            is_over: Whether all others have ended their ranks already, as they do when
                one host is gone. Then a shorter silence is enough.
        """
        seconds = _SILENT_SECONDS if is_over else LOST_SECONDS
        found = self._presence.lost(names, seconds)
        self._lost |= set(found)
        return dict.fromkeys(found, seconds)

    def _leaving_text(self) -> str:
        """Return the hosts of the start that a signal asks to leave, in words."""
        names = [name for name in self._leaving() if name in self._chosen]
        return "; ".join(f"host {self._host_of(name)} leaves" for name in names)

    def _change_text(self) -> str:
        """Return why the next start should have other hosts; empty if it should not."""
        if not self._plan.is_elastic or self._starter.waits():
            return ""
        self._dismiss(self._chosen)
        members = self._members()
        numbers = self._starter.ordered(members, self._plan, self._chosen)
        for name in set(members) - set(numbers) - set(self._chosen):
            self._let_wait(name, waiting_text(self._plan.num_hosts))
        new = [name for name in numbers if name and name not in self._chosen]
        changes = self._starter.changes(self._running)
        if not changes and time.monotonic() - self._came < self._plan.settle:
            return ""  # others may come with it
        come = [f"host {members[name].host} has come" for name in new]
        return "; ".join([*changes, *come])

    def _is_enough(self, count: int) -> bool:
        """Return whether a job can start, and is not to wait for more hosts."""
        if count == self._plan.num_hosts:
            return True
        waits = self._starter.waits()
        if waits is None:
            waits = time.monotonic() - self._came < self._plan.settle
        return count >= self._plan.least and not waits

    def _missing(self, members: dict[str, Member], numbers: list[str | None]) -> str:
        """Describe who is there, and who is missing."""
        there = [members[name].host for name in numbers if name is not None]
        away = [number for number, name in enumerate(numbers) if name is None]
        known = [self._plan.names[number] for number in away if self._plan.names]
        named = ", ".join(known or [f"node rank {number}" for number in away])
        count = nnodes_text(self._plan.min_hosts, self._plan.num_hosts)
        text = f"{len(there)} of {count} ({', '.join(there)})"
        if (found := self._starter.named()) is not None:
            texts = []
            for host in found[0]:
                left = self.left_out.seconds(host)
                why = f"left out for {left:.0f} s" if left else "not reached by ssh"
                texts += [] if host in there else [f"{host}, {why}"]
            texts = list(filter(None, [*texts, found[1]]))
            return f"{text}; missing: {'; '.join(texts) or 'no others are named'}"
        if self._plan.is_elastic:
            named = f"{self._plan.least - len(there)}{self._were_there(there)}"
        return f"{text}; missing: {named}"

    def _were_there(self, there: Sequence[str]) -> str:
        """Describe the hosts that have been there before."""
        hosts = {member["host"] for member in self.values.of_kind("join").values()}
        named = []
        for host in sorted(hosts - set(there)):
            left = self.left_out.seconds(host)
            named.append(f"{host}, left out for {left:.0f} s" if left else host)
        return f"; was there before: {'; '.join(named)}" if named else ""

    def _late_text(self, missing: str) -> str:
        seconds = self._plan.timeout
        if self._starter.named() is not None:
            return f"Too few hosts are there. Received: {missing}, for {seconds:g} s."
        return (
            f"Not all hosts have come within {seconds:g} s. Received: {missing}. Start "
            f"the same command on each of them; each has to reach {self._plan.meeting}."
        )

    def _late_hosts(self) -> list[str]:
        agents = self._starter.late_agents()
        return [agents[name] for name in self._presence.late(list(agents))]

    def _members(self) -> dict[str, Member]:
        """Return the hosts that may take part, in the order in which they came."""
        found = self.values.of_kind("join")
        gone = self._gone(list(found))
        members = {n: Member(**found[n]) for n in found if n not in gone}
        for name, member in list(members.items()):
            if not self._agrees(name, member) or self._is_left_out(name, member):
                del members[name]
        if set(members) - self._known:
            self._known |= set(members)
            self._came = time.monotonic()
        return self._starter.members(members)

    def _gone(self, came: Sequence[str]) -> set[str]:
        """Return which of the hosts that have come have left since, or are lost."""
        gone = {**self.values.of_kind("left"), **self.values.of_kind("stopped")}
        gone |= self._starter.ended()
        names = [name for name in came if name not in gone]
        self._presence.look(names)
        self._lost &= set(self._presence.lost(names, _SILENT_SECONDS))
        return {*gone, *self._lost, *self._presence.lost(names)}

    def _agrees(self, name: str, member: Member) -> bool:
        """Return whether a host expects the same job; one that does not has to end."""
        nnodes = nnodes_text(self._plan.min_hosts, self._plan.num_hosts)
        if (member.nnodes, member.version) == (nnodes, __version__):
            return True
        text = (
            "keras-dist: the hosts of a job have to agree on `--nnodes` and on the "
            f"version of keras_dist. Received: {member.nnodes} and {member.version} "
            f"here, {nnodes} and {__version__} on the first host."
        )
        self._order(name, do="exit", code=1, text=text)
        return False

    def _is_left_out(self, name: str, member: Member) -> bool:
        """Return whether a host is left out, and let it wait."""
        if name == self._first or not self.left_out.seconds(member.host):
            return False
        self._let_wait(name, left_out_text(member.host))
        return True

    def _let_wait(self, name: str, text: str) -> None:
        member = self.values.get(f"join.{name}") or {}
        self._order(name, do="wait", text="" if member.get("is_quiet") else text)

    def _take_back(self) -> None:
        """Let a host that is left out take part again, if there is one."""
        found = self.values.of_kind("join")
        gone = self._gone(list(found))
        there = {n: Member(**found[n]) for n in found if n not in gone}
        hosts = [member.host for member in self._starter.members(there).values()]
        if host := self.left_out.take_back(hosts):
            print_message(taken_back_text(host))

    def _host_of(self, name: str) -> str:
        return str((self.values.get(f"join.{name}") or {}).get("host", ""))

    def _leaving(self) -> list[str]:
        """Return the hosts that a signal asks to leave a job that goes on."""
        if not self._plan.is_elastic:
            return []
        found = self.values.of_kind("stopped")
        return [n for n, s in found.items() if is_saving([s]) and n != self._first]

    def _dismiss(self, running: Sequence[str | None] = ()) -> None:
        """Let the hosts go that leave the job, but for those with ranks that run."""
        found = self.values.of_kind("stopped")
        left = self.values.of_kind("left")
        for name in self._leaving():
            if name not in left and name not in running:
                host = self._host_of(name)
                text = stopped_text(found[name], has_saved=False, host=host)
                text = f"{text} The job goes on without this host."
                self._order(name, do="exit", code=128 + found[name], text=text)

    def _order(self, name: str, **values: Any) -> None:
        """Write what a host has to do now."""
        self.values.put(f"order.{name}", values)
