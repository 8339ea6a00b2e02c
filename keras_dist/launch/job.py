"""A job on one host or on several: one launcher on each, and the store on the first.

All launchers do the same: each runs the ranks of its host, and reports how they have
ended. On the first host a thread, the coordinator, decides when ranks start and end.

In the store, with K the number of a host: `host.K` describes it; `beat.K` has a count
that grows, and the signal that its launcher has received; `report.START.K` is how its
ranks have ended; `left.K` says that its launcher exits. The coordinator writes `state`:
what all hosts do now.
"""

import contextlib
import io
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from signal import SIGHUP, SIGUSR1
from typing import Any

from keras_dist.clusters import Place
from keras_dist.clusters.slurm import Slurm
from keras_dist.launch import horovod_library, processes
from keras_dist.launch.failures import (
    LOST_SECONDS,
    Report,
    lost_text,
    parse_report,
    print_message,
    ranks_in_words,
    verdict,
)
from keras_dist.launch.hosts import LOOPBACK
from keras_dist.launch.monitor import seeds
from keras_dist.launch.network import (
    check_own_name,
    has_only_ipv6,
    interface,
    is_loopback,
    resolve_node,
)
from keras_dist.launch.processes import ORDERED, is_saving, stopped_by_signals
from keras_dist.launch.ranks import RESTART, Command, run_ranks
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.signing import derived
from keras_dist.launch.store import (
    Store,
    StoreClient,
    assign_ranks,
    serve_at,
    store_variables,
)
from keras_dist.version import __version__

# Seconds in which all hosts have to come; and in which a command that ssh has started
# has to reach the first host.
_TIMEOUT, _SSH_TIMEOUT = 300.0, 20.0

# Seconds between two looks, between two heartbeats (while ranks run, and while this
# host waits for the others), and between two lines about hosts that are missing.
_TICK, _BEAT_SECONDS, _WAIT_SECONDS, _SAY_SECONDS = 0.05, 1.0, 0.1, 15.0

# Between two looks at the heartbeats; more means that this machine was suspended.
_LONGEST_LOOK = 5.0

# Seconds in which a host has to end its ranks and report; the second number if they
# may save before. And seconds for which the store stays until all hosts have left.
_STOP_SECONDS, _SAVE_SECONDS, _LEAVE_SECONDS = LOST_SECONDS + 2, 45.0, 10.0

# Of these errors the message is enough.
_NAMED_ERRORS = (ImportError, OSError, RuntimeError, ValueError)


def run_job(
    command: Command,
    place: Place,
    num_ranks: int,
    secret: str,
    *,
    restarts: int = 0,
    is_silent: bool = False,
    over_ssh: bool = False,
) -> int:
    """Run this host's part of a job, and end every process that it has started.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        place: Number of this host, number of hosts, and where the first host is.
        num_ranks: Number of ranks of this host.
        secret: Secret of the job.
        restarts: The largest number of restarts after failures; that of the first host
            counts.
        is_silent: Whether nothing is said about the start.
        over_ssh: Whether standard input has the numbers of signals, and its end means
            that the command which has started this one is gone.

    Returns:
        The exit code of the job, the same on all hosts: 0, or that of the rank that
        failed first, or 128 + the number of the signal that stopped the job.

    Raises:
        OSError: If the port is in use.
        RuntimeError: If Horovod is not installed.
        ValueError: If the hosts cannot meet.
    """
    job, is_slurm = secrets.token_hex(8), "SLURM_JOB_ID" in os.environ
    address = place.address
    if place.launcher == Slurm.name:
        address = resolve_node(address)
    if has_only_ipv6(address):
        raise ValueError(
            "Hosts meet at an IPv4 address, by which their ranks connect, too. "
            f"Received: {address}, which has IPv6 addresses alone on this host. Name "
            "an IPv4 address of the first host, the same on all hosts: "
            f"--rdzv 10.0.0.1:{place.port}"
        )
    with (
        processes.reaper(job),  # is forked, so before the first thread
        stopped_by_signals(*[SIGUSR1] * is_slurm) as stopped,
        contextlib.ExitStack() as stack,
    ):
        processes.allow_files()
        port, timeout = place.port, _SSH_TIMEOUT if over_ssh else _TIMEOUT
        is_quiet, coordinator = over_ssh or is_slurm, None
        if place.rank == 0:
            store = serve_at(address, port, secret, is_alone=place.size == 1)
            stack.callback(store.close)
            address, port = store.address, store.port
            client = StoreClient(address, port, secret)
            begin = None if is_silent else command.kind != "program"
            first = Coordinator(
                client, store, place.size, restarts, begin, is_quiet=is_quiet
            )
            coordinator = _start_thread(first.run)
        client = StoreClient(address, port, secret)
        host = Host(client, secret, place, num_ranks, stopped, is_quiet=is_quiet)
        if over_ssh:
            _start_thread(_read_signals, stopped, host)
        code = host.run(command, job, timeout)
        if coordinator is not None and not host.is_cut:
            coordinator.join()
        return code


def _start_thread(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _read_signals(stopped: list[int], host: "Host") -> None:
    """In a thread, read what `launch.ssh` writes, to the end of the connection."""
    # Without a buffer, whose lock this thread would hold when Python ends.
    lines = io.FileIO(0, closefd=False)
    for line in iter(lines.readline, b""):
        stopped.append(int(line))
    stopped.append(SIGHUP)
    host.cut()


class Host:
    """A host of a job: runs its ranks when the coordinator starts them.

    Args:
        client: The client of the job's store.
        secret: Secret of the job.
        place: Number of this host, and number of hosts.
        num_ranks: Number of ranks of this host.
        stopped: Numbers of the signals that this process has received.
        is_quiet: Whether the first host prints to the same screen.
    """

    def __init__(
        self,
        client: StoreClient,
        secret: str,
        place: Place,
        num_ranks: int,
        stopped: Sequence[int],
        *,
        is_quiet: bool,
    ) -> None:
        self._client, self._secret, self._stopped = client, secret, stopped
        self._number, self._num_hosts = place.rank, place.size
        self._num_ranks, self._is_quiet = num_ranks, is_quiet
        # As a task of `ssh` or SLURM, a host may have a name of its own.
        given = (os.environ.get(n) for n in ("HOROVOD_HOSTNAME", "SLURMD_NODENAME"))
        self._name = next(filter(None, given), socket.gethostname())
        self._id = secrets.token_hex(8)
        self._state: Mapping[str, Any] = {}
        self._is_running = False
        self.is_cut = False
        # Why the coordinator is not followed any more; empty if it is.
        self._gone = ""

    def run(self, command: Command, job: str, timeout: float) -> int:
        """Join the job, and do what the coordinator says, to the end.

        Args:
            command: The command that the ranks run.
            job: Id of the processes that this host starts.
            timeout: Seconds to wait for the first host.

        Returns:
            The exit code of the job.

        Raises:
            ValueError: If the first host cannot be reached, is lost, or has another
                job.
        """
        # The first host waits for the coordinator, which lets all know of a signal.
        stopped = self._stopped if self._number else ()
        ends = self._client.wait(self._name, timeout=timeout, stopped=stopped)
        if ends is None:
            return 128 + self._stopped[0]
        self._join(*ends)
        _start_thread(self._keep_in_touch)
        start = 0
        while "code" not in self._state:
            if self.is_cut:
                return 128 + SIGHUP
            if self._gone:
                raise ValueError(self._gone)
            if self._state["start"] == start:
                self._is_running = True
                report = self._run_start(start, command, job, *ends)
                self._is_running = False
                name = f"report.{start}.{self._number}"
                if not self._gone:
                    self._client.put_surely(name, report.values())
                start += 1
            elif self._stopped and not start and self._number:
                self._client.put(f"host.{self._number}", None)  # others may come
                return 128 + self._stopped[0]
            time.sleep(_TICK)
        self._client.put(f"left.{self._number}", True)
        if self._number and not self._is_quiet and self._state["text"]:
            print_message(self._state["text"])
        return int(self._state["code"])

    def cut(self) -> None:
        """End the ranks, and wait for nobody: what has started this host is gone."""
        self.is_cut, self._gone = True, "The command that has started this one is gone."

    def _join(self, own: str, reached: str) -> None:
        """Describe this host to the coordinator."""
        begin = time.monotonic()
        while not self._state and time.monotonic() - begin < LOST_SECONDS:
            self._state = self._client.get("state") or {}
        facts = [self._num_hosts, __version__]
        if self._state.get("facts") != facts:
            raise ValueError(
                "The hosts of a job have to agree on `--nnodes` and on the version of "
                f"keras_dist. Received: {facts} here, and {self._state.get('facts')} "
                "on the first host."
            )
        description = [self._id, self._name, self._num_ranks, reached]
        self._client.put_surely(f"host.{self._number}", description)

    def _keep_in_touch(self) -> None:
        """In a thread: send heartbeats, and read what the coordinator has written."""
        where = f"{self._client.address}:{self._client.port}"
        answered, beats, nonce = time.monotonic(), 0, self._state["nonce"]
        while not self._gone and "code" not in self._state:
            beats, told, begin = beats + 1, list(self._stopped[:1]), time.monotonic()
            if begin - answered > LOST_SECONDS + _LONGEST_LOOK:
                answered = begin  # this host was suspended
            is_there = self._client.put(f"beat.{self._number}", [beats, *told])
            state = self._client.get("state") if is_there else None
            if is_there:
                answered = time.monotonic()
            elif time.monotonic() - answered > LOST_SECONDS:
                self._gone = (
                    "The first host was lost, and the job ends with it. Received: no "
                    f"answer from {where} for {LOST_SECONDS:g} s. Start the same "
                    "command on all hosts again; with `resume=` it goes on."
                )
            if state and state["nonce"] != nonce:
                self._gone = (
                    "The command of the first host was started again, and the job that "
                    f"it had before has ended. Received: another job at {where}. Start "
                    "the same command here again; with `resume=` it goes on."
                )
            elif state:
                self._state = state
            while told == list(self._stopped[:1]):
                pause = _BEAT_SECONDS if self._is_running else _WAIT_SECONDS
                if time.monotonic() - begin > pause:
                    break
                time.sleep(_TICK)

    def _run_start(
        self, start: int, command: Command, job: str, own: str, reached: str
    ) -> Report:
        """Run the ranks of one start to their end."""
        state = self._state
        if self._id not in [each[0] for each in state["hosts"]]:
            raise ValueError(
                "The job has all its hosts. Received: one more, with the node rank "
                f"{self._number}. Give each host a number of its own."
            )
        slots = assign_ranks([(name, count) for _, name, count, _ in state["hosts"]])
        host = state["hosts"][self._number][1]
        if is_loopback(own):
            own = state["reached"]  # as the others see this host
        seed = str(int(derived(state["nonce"], "seed")[:8], 16))  # after a restart, too
        variables = {
            **store_variables(reached, self._client.port, self._secret),
            SECRET: derived(self._secret, f"ranks {state['nonce']} {start}"),
            seeds.VARIABLE: os.environ.get(seeds.VARIABLE) or seed,
            **({RESTART: str(start)} if start else {}),
        }
        try:
            if self._num_hosts > 1 and not horovod_library.uses_named_network():
                check_own_name(own)
            return run_ranks(
                command,
                [slot for slot in slots if slot.hostname == host],
                {**variables, **interface(own)},
                job,
                stop=lambda: self._stop(start),
                has_peers=self._num_hosts > 1,
            )
        except (OSError, RuntimeError, ValueError) as error:
            return Report(error=str(error))

    def _stop(self, start: int) -> int:
        """Return the number of the signal that ends the ranks now; 0 for none."""
        if self._stopped:
            return self._stopped[0]
        is_over = self._gone or self._state["start"] != start or "code" in self._state
        return int(ORDERED if is_over else self._state["stop"])


class Coordinator:
    """Decides, on the first host, when the ranks of all hosts start and end.

    Args:
        client: The client of the job's store.
        store: The store.
        num_hosts: Number of hosts.
        restarts: The largest number of restarts after failures.
        begin: Whether the ranks will import TensorFlow, as far as is known; `None` to
            say nothing about the start.
        is_quiet: Whether all hosts print to one screen.
    """

    def __init__(
        self,
        client: StoreClient,
        store: Store,
        num_hosts: int,
        restarts: int,
        begin: bool | None,
        *,
        is_quiet: bool,
    ) -> None:
        self._client, self._store, self._numbers = client, store, range(num_hosts)
        self._restarts, self._begin, self._is_quiet = restarts, begin, is_quiet
        facts = {"facts": [num_hosts, __version__], "nonce": secrets.token_hex(16)}
        self._state: dict[str, Any] = {**facts, "start": -1}
        # Id, name, number of ranks and way to this host, of each host that has come.
        self._hosts: dict[int, list[Any]] = {}
        # The last heartbeat of each host, and when it was first seen.
        self._beats: dict[int, tuple[Any, float]] = {}
        self._looked = time.monotonic()
        self._write()

    def run(self) -> None:
        """In a thread: run the job to its end, and let all hosts know of it."""
        try:
            code, text = self._run_job()
        except Exception as error:  # or the hosts would wait forever
            is_named = isinstance(error, _NAMED_ERRORS)
            text = str(error) if is_named else traceback.format_exc()
            code, text = 1, f"keras-dist: {text}"
            print_message(text)
        line = text.partition("\n")[0]
        if line != text:
            first = self._hosts.get(0, ["", "the first host"])[1]
            line = f"{line} All of it is in the output of {first}."
        self._write(code=code, text=line)
        begin = time.monotonic()
        while time.monotonic() - begin < _LEAVE_SECONDS:
            values = self._look()
            staying = [k for k in self._hosts if f"left.{k}" not in values]
            if not set(staying) - set(self._lost(staying)):
                return
            time.sleep(_TICK)

    def _run_job(self) -> tuple[int, str]:
        """Start the ranks until the job has ended; return exit code and message."""
        code, text = self._gather_hosts()
        for start in range(self._restarts + 1):
            if text:
                break
            code, text, is_final = self._run_start(start)
            if text:
                print_message(text)
            if not code or is_final or start == self._restarts:
                break
            text = ""
            count = self._restarts + 1
            print_message(f"keras-dist: start {start + 2} of at most {count}.")
        return code, text

    def _gather_hosts(self) -> tuple[int, str]:
        """Wait for all hosts; return exit code and message if a signal ends the wait.

        Raises:
            TimeoutError: If some are missing.
        """
        begin = said = time.monotonic()
        while True:
            values, now = self._look(), time.monotonic()
            found = {k: values.get(f"host.{k}") for k in self._numbers}
            self._hosts = {k: host for k, host in found.items() if host}
            if number := values.get("beat.0", [0])[1:]:
                code, text = self._stopped_end(0, number[0], {})
                print_message(text)
                return code, text
            missing = [str(k) for k in self._numbers if k not in self._hosts]
            if not missing:
                break
            there = ", ".join(host[1] for host in self._hosts.values())
            said_of = f"{len(self._hosts)} of {len(self._numbers)} ({there}); "
            said_of += f"missing: node rank {', '.join(missing)}"
            if now - begin > _TIMEOUT:
                raise TimeoutError(
                    f"Not all hosts have come within {_TIMEOUT:g} s. Received: "
                    f"{said_of}. Start the same command on each of them; each has to "
                    "reach the address and port of `--rdzv`."
                )
            if now - said > _SAY_SECONDS:
                said = now
                print_message(f"keras-dist: waiting for hosts: {said_of}.")
            time.sleep(_TICK)
        names = [host[1] for host in self._hosts.values()]
        for number, host in self._hosts.items():  # several launchers of one machine
            if host[1] in names[:number]:
                host[1] = f"{host[1]}-{number}"
        if self._begin is not None:
            counts = [host[2] for host in self._hosts.values()]
            name = names[0] if self._is_quiet else "this host"
            print_message(begin_text(counts, name, is_importing=self._begin))
        return 0, ""

    def _run_start(self, start: int) -> tuple[int, str, bool]:
        """Run the ranks once; return exit code, message, and whether it was final."""
        hosts = [self._hosts[k] for k in self._numbers]
        slots = assign_ranks([(name, count) for _, name, count, _ in hosts])
        ranks = {
            k: [slot.rank for slot in slots if slot.hostname == self._hosts[k][1]]
            for k in self._numbers
        }
        self._store.open(slots)
        ways = [way for *_, way in hosts if not is_loopback(way)]
        way = ways[0] if ways else LOOPBACK
        self._write(start=start, hosts=hosts, reached=way, stop=0)
        reports, lost, stops = self._watch(start, ranks)
        if stops:
            return *self._stopped_end(*stops[0], reports), True
        if len(reports) == len(hosts) and all(r.finished for r in reports.values()):
            return 0, "", True
        is_one = len(hosts) == 1
        causes, unknown, by_rank = list(lost.values()), list[int](), dict[int, str]()
        for k in self._numbers:
            name = self._hosts[k][1]
            by_rank.update(dict.fromkeys(ranks[k], "" if is_one else name))
            if k not in reports:
                unknown += ranks[k]
                named = ranks_in_words(ranks[k])
                causes.append(f"host {name} has sent no report ({named}).")
            elif reports[k].error:
                cause = reports[k].error
                causes.append(
                    cause if is_one else f"no ranks could be run on {name}: {cause}"
                )
        first = (causes[0], 1) if causes else None
        text, code = verdict(
            list(reports.values()), first, hosts=by_rank, unknown=unknown
        )
        return code, text, bool(unknown)

    def _watch(
        self, start: int, ranks: Mapping[int, Sequence[int]]
    ) -> tuple[dict[int, Report], dict[int, str], list[tuple[int, int]]]:
        """Wait for the reports of all hosts; end all ranks if one has failed.

        Returns:
            The reports; what has happened to hosts that were lost; and the signals that
            launchers have received, each with the number of the host.
        """
        reports, lost = dict[int, Report](), dict[int, str]()
        end = None
        while True:
            values = self._look()
            stops = [
                (k, number)
                for k in self._numbers
                for number in values.get(f"beat.{k}", [0])[1:]
            ]
            for k in self._numbers:
                if k not in reports and (found := values.get(f"report.{start}.{k}")):
                    reports[k] = parse_report(found)
            for k in self._lost([k for k in self._numbers if k not in reports]):
                lost.setdefault(k, lost_text(self._hosts[k][1], ranks[k]))
            if len({*reports, *lost}) == len(self._numbers):
                return reports, lost, stops
            has_failed = lost or any(each.code for each in reports.values())
            if end is None and (stops or has_failed):
                saving = bool(stops) and is_saving(stops[0][1])
                self._write(stop=stops[0][1] if saving else ORDERED)
                end = time.monotonic() + (_SAVE_SECONDS if saving else _STOP_SECONDS)
            if end is not None and time.monotonic() > end:
                return reports, lost, stops
            time.sleep(_TICK)

    def _stopped_end(
        self, number: int, signal: int, reports: Mapping[int, Report]
    ) -> tuple[int, str]:
        """Return exit code and message of a job that a signal has ended."""
        has_saved = len(reports) == len(self._numbers)
        has_saved = has_saved and all(each.saved for each in reports.values())
        is_named = len(self._numbers) > 1 and not self._is_quiet
        where = self._hosts[number][1] if is_named else ""
        code = 128 + signal
        if has_saved and "SLURM_JOB_ID" in os.environ:
            code = processes.SAVED  # so that the job's script requeues it
        return code, processes.stopped_text(signal, has_saved=has_saved, host=where)

    def _look(self) -> dict[str, Any]:
        """Read all values, and note the heartbeats."""
        values, now = self._client.get_all("") or {}, time.monotonic()
        pause = now - self._looked
        self._looked = now
        for k in self._hosts:
            beat = values.get(f"beat.{k}")
            before, since = self._beats.get(k, (None, now))
            if pause > _LONGEST_LOOK:
                since += pause
            self._beats[k] = (beat, now if beat != before else since)
        return values

    def _lost(self, numbers: Sequence[int]) -> list[int]:
        """Return those of these hosts whose heartbeats have ended 15 s ago."""
        first = self._looked - LOST_SECONDS
        return [k for k in numbers if self._beats.get(k, (None, first))[1] < first]

    def _write(self, **values: Any) -> None:
        self._state |= values
        self._client.put_surely("state", self._state)


def begin_text(counts: Sequence[int], name: str, *, is_importing: bool = True) -> str:
    """Return the line that says what is started: nothing else does, for seconds.

    Args:
        counts: Number of ranks of each host.
        name: Name of the first one.
        is_importing: Whether the ranks will import TensorFlow, as far as is known.

    >>> print(begin_text([2], "this host"))
    keras-dist: 2 ranks on this host, importing TensorFlow
    """
    where = f"{len(counts)} hosts" if len(counts) > 1 else name
    text = f"keras-dist: {sum(counts)} rank{'s' * (sum(counts) != 1)} on {where}"
    return f"{text}, importing TensorFlow" if is_importing else text
