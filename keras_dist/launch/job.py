"""Start the ranks of a job, watch its hosts, and start the ranks again: one loop.

The process with the store of the job runs it: `keras-dist run` on one machine, on the
first host, or as the launcher of `-H`, which has no ranks of its own. The other hosts
follow (`agent`).

In the store, with ID the id of another host: `order` is what all hosts have to do;
`join.ID` describes the host; `beat.ID` is its heartbeat; `report.START.ID` is how its
ranks have ended; `stopped.ID` is a signal that it has received; `left.ID` says that it
has ended.
"""

import contextlib
import os
import secrets
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist.launch import processes
from keras_dist.launch.agent import Header, run_with_peers
from keras_dist.launch.failures import (
    LOST_SECONDS,
    Report,
    lost_text,
    parse_report,
    print_message,
    ranks_in_words,
    verdict,
)
from keras_dist.launch.hosts import (
    LOOPBACK,
    Meeting,
    Member,
    Slot,
    assign_slots,
    count_ranks,
    is_here,
    number_hosts,
)
from keras_dist.launch.network import own_address
from keras_dist.launch.processes import (
    allow_files,
    is_saving,
    stopped_by_signals,
    stopped_text,
)
from keras_dist.launch.ranks import Assignment, Command, job_seed, run_ranks
from keras_dist.launch.ssh import Ssh, SshHosts, with_environment
from keras_dist.launch.store import OwnStoreClient, Store, StoreClient, secret_of_start

# Files that are open at once: three pipes of each host, a connection of each rank.
_FILES_OF_RANK = 8

# Of these errors the message is enough.
_NAMED_ERRORS = (ImportError, OSError, RuntimeError, ValueError)

_TICK = 0.1

# Seconds between two looks at who is there while ranks run, and between two lines about
# hosts that are missing.
_LOOK_SECONDS, _SAY_SECONDS = 0.5, 15.0

# Between two looks at the heartbeats; more means that this machine was suspended.
_LONGEST_LOOK = 5.0

# Seconds in which a host has to end its ranks and report; the second number if they
# may save before.
_STOP_SECONDS, _SAVE_SECONDS = LOST_SECONDS + 2, 45.0

# Seconds for which the store stays until all hosts have seen the end.
_LEAVE_SECONDS = 10.0

# Id of the host that runs the loop.
_OWN = ""


@dataclass(frozen=True)
class OwnRanks:
    """The ranks of the host that runs the loop.

    Args:
        command: The command that they run.
        member: The host.
        job: Id of the job, by which their processes are found.
    """

    command: Command
    member: Member
    job: str


@dataclass(frozen=True)
class End:
    """How a start, or the job, has ended.

    Args:
        code: The exit code.
        text: The message for the user.
        is_final: Whether there is no other start: a signal has stopped the job, or a
            host was lost.
    """

    code: int
    text: str = ""
    is_final: bool = False


class Presence:
    """When each host's last heartbeat was seen.

    Args:
        store: The store of the job.
    """

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._looked = time.monotonic()
        # For each host that has answered: its last heartbeat, and when it was seen.
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, running: Collection[str]) -> None:
        """Read the heartbeats of hosts that run, twice a second."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        pause = now - self._looked
        if pause > _LONGEST_LOOK:
            self._seen = {k: (n, t + pause) for k, (n, t) in self._seen.items()}
        self._looked = now
        found = self._store.get_all("beat.") or {}  # one request, however many hosts
        for name in running:
            beats = found.get(f"beat.{name}")
            if beats is not None and self._seen.get(name, (0, 0.0))[0] != beats:
                self._seen[name] = beats, now

    def lost(self, running: Collection[str]) -> list[str]:
        """Return the hosts that run, as far as is known, but were silent for 15 s."""
        return [
            name
            for name in running
            if name in self._seen and self._looked - self._seen[name][1] > LOST_SECONDS
        ]


class Job:
    """A job, in the process that has its store.

    Args:
        meeting: How many hosts there are, and where they meet.
        store: The store of the job.
        secret: Secret of the job.
        stopped: Numbers of the signals that this process has received.
        own: The ranks of this host; `None` for none.
        ssh: The other hosts, if this process has started them.
    """

    def __init__(
        self,
        meeting: Meeting,
        store: Store,
        secret: str,
        stopped: Sequence[int],
        *,
        own: OwnRanks | None = None,
        ssh: SshHosts | None = None,
    ) -> None:
        self.values = OwnStoreClient(store, secret, num_hosts=meeting.num_hosts)
        self._meeting, self._store, self._secret = meeting, store, secret
        self._stopped, self._own, self._ssh = stopped, own, ssh
        self._is_alone = own is not None and meeting.num_hosts == 1
        self._presence = Presence(self.values)
        # The hosts of the job by their numbers, once all are there.
        self._members: Mapping[str, Member] = {}
        # Of this start: the reports that have come; and what has happened to hosts that
        # were lost, with the exit code for it, that which was seen first before others.
        self._reports: dict[str, Report] = {}
        self._lost: dict[str, tuple[str, int]] = {}

    def run(self, *, restarts: int, timeout: float = 0.0) -> int:
        """Run the job to its end, and let all hosts know of it; errors are printed.

        Args:
            restarts: The largest number of restarts after failures.
            timeout: Seconds to wait for the hosts.

        Returns:
            The exit code.
        """
        try:
            end = self._run(restarts, timeout)
        except Exception as error:  # or the hosts would wait forever
            is_named = isinstance(error, _NAMED_ERRORS)
            text = str(error) if is_named else traceback.format_exc()
            end = End(1, f"keras-dist: {text}")
            print_message(end.text)
        self._send_end(end)
        return end.code

    def _run(self, restarts: int, timeout: float) -> End:
        """Wait for all hosts, and start the ranks again until the job has ended."""
        end = self._wait(timeout)
        for start in range(restarts + 1):
            if end is None:
                end = self._start(start)
            if end.text:
                print_message(end.text)
            if not end.code or end.is_final or start == restarts:
                break
            print_message(f"keras-dist: start {start + 2} of at most {restarts + 1}.")
            end = self._stopped_end({})
        assert end is not None
        return end

    def _wait(self, timeout: float) -> End | None:
        """Wait for all hosts; return the end of the job if they do not come.

        Raises:
            TimeoutError: If some are missing.
        """
        begin = said = time.monotonic()
        while not (end := self._stopped_end({})):
            joined = self._joined()
            numbers = number_hosts(joined, self._meeting.num_hosts)
            if None not in numbers:
                members = {name: joined[name] for name in numbers if name is not None}
                self._members = members
                if self._ssh is None and not self._is_alone:
                    print_message(begin_text(count_ranks(list(members.values()))))
                return None
            if self._ssh is not None and (failed := self._ssh.failed(joined)):
                host, code = failed
                text = f"no ranks could be run on {host}: exit code {code}."
                return End(code or 1, f"keras-dist: {text}", is_final=True)
            now = time.monotonic()
            if now - begin > timeout:
                text = self._missing(joined, numbers)
                raise TimeoutError(self._late_text(text, timeout))
            if now - said > _SAY_SECONDS:
                said = now
                text = self._missing(joined, numbers)
                print_message(f"keras-dist: waiting for hosts: {text}.")
            self._pause(_TICK)
        return end

    def _joined(self) -> dict[str, Member]:
        """Return the hosts that are there, in the order in which they came."""
        joined = {} if self._own is None else {_OWN: self._own.member}
        found = self.values.of_kind("join")
        gone = {*self.values.of_kind("left"), *self.values.of_kind("stopped")}
        names = [name for name in found if name not in gone]
        self._presence.look(names)
        lost = self._presence.lost(names)
        return joined | {n: Member(**found[n]) for n in names if n not in lost}

    def _missing(
        self, joined: Mapping[str, Member], numbers: Sequence[str | None]
    ) -> str:
        """Describe who is there, and who is missing."""
        there = [joined[name].host for name in numbers if name is not None]
        away = [number for number, name in enumerate(numbers) if name is None]
        known = [self._meeting.names[number] for number in away if self._meeting.names]
        named = ", ".join(known or [f"node rank {number}" for number in away])
        listed = ", ".join(there)
        return f"{len(there)} of {self._meeting.num_hosts} ({listed}); missing: {named}"

    def _late_text(self, missing: str, timeout: float) -> str:
        text = f"Not all hosts have come within {timeout:g} s. Received: {missing}."
        if self._ssh is not None:
            return text
        return (
            f"{text} Start the same command on each of them; each has to reach "
            f"{self._meeting.address}:{self._meeting.port}."
        )

    def _start(self, start: int) -> End:
        """Start the ranks of all hosts, and wait for their end."""
        members = self._members
        slots = dict(zip(members, assign_slots(list(members.values())), strict=True))
        allow_files(_FILES_OF_RANK * sum(map(len, slots.values())))
        secret = secret_of_start(self._secret, self.values.nonce, start)
        self._store.open([slot for own in slots.values() for slot in own], secret)
        reached = [member.reached for member in members.values()]
        reached = [each for each in reached if not each.startswith("127.")]
        address = reached[0] if reached else LOOPBACK
        hosts = [[name, m.host, m.num_ranks] for name, m in members.items()]
        seed = job_seed(self.values.nonce)
        self._order("run", start=start, hosts=hosts, seed=seed, reached=address)
        self._reports, self._lost = {}, {}
        if self._own is None:
            self._watch(slots, start, [])
        else:
            assignment = Assignment(
                slots=slots[_OWN],
                store=self._store.variables(secret),
                secret=secret,
                restart=start,
                seed=seed,
                has_peers=not self._is_alone,
            )
            self._run_own(assignment, address, slots)
        if end := self._stopped_end(self._reports):
            return end
        reports = self._reports.values()
        if len(reports) == len(members) and all(each.finished for each in reports):
            return End(0)
        return self._failed_end(slots)

    def _run_own(
        self,
        assignment: Assignment,
        address: str,
        slots: Mapping[str, Sequence[Slot]],
    ) -> None:
        """Run the ranks of this host, in this thread, while another one watches."""
        assert self._own is not None
        command, job = self._own.command, self._own.job
        if self._is_alone:
            self._reports[_OWN] = run_ranks(
                command, assignment, job, address=address, stopped=self._stopped
            )
            return
        stops: list[int] = []
        errors: list[Exception] = []

        def watch() -> None:
            try:
                self._watch(slots, assignment.restart, stops)
            except Exception as error:
                errors.append(error)
                stops.append(processes.ORDERED)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        self._reports[_OWN] = run_with_peers(
            command, assignment, job, address=address, stopped=stops
        )
        thread.join()
        if errors:
            raise errors[0]

    def _watch(
        self, slots: Mapping[str, Sequence[Slot]], start: int, stops: list[int]
    ) -> None:
        """Wait for the reports of all hosts; end all ranks if one has failed.

        Args:
            slots: The slots of each host, by its id.
            start: Number of the start.
            stops: Numbers of signals that end the ranks of this host, to which one is
                appended.
        """
        ranks = {name: [slot.rank for slot in own] for name, own in slots.items()}
        ending: float | None = None
        while silent := [n for n in ranks if n not in {**self._reports, **self._lost}]:
            self._pause(_TICK)
            self._reports.update(self._new_reports(silent, start))
            silent = [n for n in silent if n not in self._reports and n != _OWN]
            for name, code in self._ended().items():
                if name in silent:
                    text = (
                        f"the agent on {self._members[name].host} was killed, or the "
                        f"connection to it was lost, while "
                        f"{ranks_in_words(ranks[name])} ran: exit code {code}."
                    )
                    self._lost.setdefault(name, (text, code or 1))
            self._presence.look(silent)
            for name in self._presence.lost(silent):
                text = lost_text(self._members[name].host, ranks[name])
                self._lost.setdefault(name, (text, 1))
            signals = [number for _, number in self._stops()]
            has_failures = any(each.code for each in list(self._reports.values()))
            if ending is None and (signals or self._lost or has_failures):
                saving = is_saving(signals)
                ending = time.monotonic() + (_SAVE_SECONDS if saving else _STOP_SECONDS)
                self._order("save" if saving else "stop", start=start)
                stops.append(signals[0] if signals else processes.ORDERED)
            if ending is not None and time.monotonic() > ending:
                break
        if self._ssh is not None:
            self._ssh.lose([name for name in ranks if name not in self._reports])

    def _new_reports(self, silent: Collection[str], start: int) -> dict[str, Report]:
        """Return the reports of this start that have come from these hosts."""
        found = {}
        for key, values in self.values.of_kind("report").items():
            number, _, name = key.partition(".")
            if number == str(start) and name in silent:
                with contextlib.suppress(
                    KeyError, TypeError, ValueError, AttributeError
                ):
                    found[name] = parse_report(values)  # else it is no report
        return found

    def _ended(self) -> dict[str, int]:
        """Return the exit codes of agents that have ended, where they are known."""
        return {} if self._ssh is None else self._ssh.ended()

    def _stops(self) -> list[tuple[str, int]]:
        """Return the signals that end the job, and the host of each, if it matters."""
        is_met = self._own is not None and not self._is_alone
        here = self._own.member.host if self._own is not None and is_met else ""
        found = self.values.of_kind("stopped")
        return [(here, number) for number in self._stopped] + [
            (self._members[name].host, number)
            for name, number in found.items()
            if name in self._members
        ]

    def _stopped_end(self, reports: Mapping[str, Report]) -> End | None:
        """Return the end of a job that a signal has stopped; `None` if none has."""
        stops = self._stops()
        if not stops:
            return None
        host, number = stops[0]
        has_saved = bool(reports) and len(reports) == len(self._members)
        has_saved = has_saved and all(report.saved for report in reports.values())
        text = stopped_text(number, has_saved=has_saved, host=host)
        code = self._meeting.saved_code if has_saved else None
        return End(code or 128 + number, text, is_final=True)

    def _failed_end(self, slots: Mapping[str, Sequence[Slot]]) -> End:
        """Find the first cause: a rank that failed, or what happened to a host."""
        causes, by_rank, unknown = list(self._lost.values()), {}, []
        for name, own in slots.items():
            host, ranks = self._members[name].host, [slot.rank for slot in own]
            by_rank.update(dict.fromkeys(ranks, "" if self._is_alone else host))
            report = self._reports.get(name)
            if report is None:
                unknown += ranks
                text = f"host {host} has sent no report ({ranks_in_words(ranks)})."
                causes.append((text, 1))
            elif report.error:
                causes.append((f"no ranks could be run on {host}: {report.error}", 1))
        text, code = verdict(
            list(self._reports.values()),
            causes[0] if causes else None,
            hosts=by_rank,
            unknown=unknown,
        )
        return End(code, text, is_final=bool(unknown))

    def _send_end(self, end: End) -> None:
        """Let all hosts end, and wait until they have seen it."""
        line = end.text.partition("\n")[0]
        if line != end.text:
            line = f"{line} All of it is in the output of {self._meeting.address}."
        self._order("exit", code=end.code, text=line)
        begin = time.monotonic()
        while time.monotonic() - begin < _LEAVE_SECONDS:
            gone = {**self.values.of_kind("left"), **self._ended()}
            staying = [n for n in self.values.of_kind("join") if n not in gone]
            self._presence.look(staying)
            if not set(staying) - set(self._presence.lost(staying)):
                return
            self._pause(_TICK)

    def _pause(self, seconds: float) -> None:
        if self._ssh is None:
            time.sleep(seconds)
        else:
            self._ssh.pass_on_for(seconds)

    def _order(self, verb: str, **values: Any) -> None:
        """Write what all hosts have to do now."""
        self.values.put("order", {"do": verb, "nonce": self.values.nonce, **values})


def run_locally(command: Command, num_ranks: int, *, restarts: int) -> int:
    """Run a command on ranks of this host, and end every process that they start.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        num_ranks: Number of ranks.
        restarts: The largest number of restarts after failures.

    Returns:
        The exit code: 0, or that of the rank that failed first, or 128 + the number of
        the signal that stopped the job.

    Raises:
        RuntimeError: If Horovod is not installed.
    """
    job = secrets.token_hex(8)
    # The reaper is forked, so before the first thread.
    with (
        processes.reaper(job),
        stopped_by_signals() as stopped,
        contextlib.closing(Store()) as store,
    ):
        own = OwnRanks(command, Member("localhost", num_ranks), job)
        secret = secrets.token_hex(16)
        return Job(Meeting(), store, secret, stopped, own=own).run(restarts=restarts)


def run_by_ssh(
    command: Command,
    hosts: Mapping[str, int],
    ssh: Ssh,
    *,
    restarts: int,
    timeout: float,
) -> int:
    """Run a command on hosts that are reached by ssh.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        hosts: The hosts, and the number of ranks of each.
        ssh: How they are reached.
        restarts: The largest number of restarts after failures.
        timeout: Seconds to wait for the hosts.

    Returns:
        The exit code of the job; see `run_locally`.

    Raises:
        OSError, ValueError: If this host has no address for the others.
        RuntimeError: If Horovod is not installed.
    """
    job, secret = secrets.token_hex(8), secrets.token_hex(16)
    # The reaper is forked, so before the first thread.
    with processes.reaper(job), stopped_by_signals() as stopped:
        others = [host for host in hosts if not is_here(host)]
        address = LOOPBACK
        if others or ssh.address is not None:
            address = own_address(ssh.address, [*others, "localhost"][0])
        with contextlib.closing(Store(address)) as store:
            meeting = Meeting(address, num_hosts=len(hosts), names=list(hosts))
            header = Header(
                address, store.port, secret, job, os.getcwd(), with_environment(command)
            )
            with contextlib.closing(SshHosts(hosts, ssh, header)) as agents:
                launcher = Job(meeting, store, secret, stopped, ssh=agents)
                return launcher.run(restarts=restarts, timeout=timeout)


def begin_text(hosts: Mapping[str, int], *, is_importing: bool = True) -> str:
    """Return the line that says what is started: nothing else does, for seconds.

    Args:
        hosts: Number of ranks of each host.
        is_importing: Whether the ranks will import TensorFlow, as far as is known.

    >>> print(begin_text({"localhost": 2}))
    keras-dist: 2 ranks on this host, importing TensorFlow
    """
    count = sum(hosts.values())
    where = f"{len(hosts)} hosts" if len(hosts) > 1 else next(iter(hosts))
    where = "this host" if where == "localhost" else where
    text = f"keras-dist: {count} rank{'s' * (count != 1)} on {where}"
    return f"{text}, importing TensorFlow" if is_importing else text
