"""A job on one host or on several: one launcher on each, and the store on the first.

All launchers run the same lines: each runs the ranks of its host, and gives the others
its report. The first one makes the verdict of the reports of all.
"""

import contextlib
import io
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from signal import SIGHUP, SIGUSR1
from typing import Any

from keras_dist.clusters import Place
from keras_dist.launch import processes
from keras_dist.launch.failures import (
    Report,
    lost_text,
    parse_report,
    print_message,
    verdict,
)
from keras_dist.launch.hosts import LOOPBACK
from keras_dist.launch.meeting import Interrupted, Meeting
from keras_dist.launch.monitor import seeds
from keras_dist.launch.network import interface, is_loopback
from keras_dist.launch.processes import ORDERED, is_saving, stopped_text
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

# Seconds in which all hosts have to come; and in which a command that ssh has started
# has to reach the first host.
_TIMEOUT, _SSH_TIMEOUT = 300.0, 20.0


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
    name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    address, port = place.address, place.port
    job, others = secrets.token_hex(8), [SIGUSR1] * ("SLURM_JOB_ID" in os.environ)
    with (
        processes.reaper(job),  # is forked, so before the first thread
        contextlib.ExitStack() as stack,
    ):
        stopped = processes.note_signals(*others)
        if over_ssh:
            threading.Thread(target=_read_signals, args=[stopped], daemon=True).start()
        store = None
        if place.rank == 0:
            store = serve_at(address, port, secret, is_alone=place.size == 1)
            stack.callback(store.close)
            address, port = store.address, store.port
        client = StoreClient(address, port, secret)
        timeout = _SSH_TIMEOUT if over_ssh else _TIMEOUT
        ends = client.wait(name, timeout=timeout, stopped=stopped)
        if ends is None:
            return 128 + stopped[0]
        meeting = stack.enter_context(
            Meeting(client, place.rank, place.size, kind="host", stopped=stopped)
        )
        is_importing = None if is_silent else command.kind != "program"
        host = Host(meeting, place, store, restarts, is_quiet=over_ssh)
        try:
            host.join([name, num_ranks, ends[1]], is_importing)
        except Interrupted:
            number = meeting.signals.get(place.rank) or meeting.signals[0]
            print_message(stopped_text(number, has_saved=False))
            return 128 + number
        variables = store_variables(ends[1], port, secret)
        return host.run(command, job, secret, variables, ends[0])


def _read_signals(stopped: list[int]) -> None:
    """In a thread, read what `launch.ssh` writes, to the end of the connection."""
    # Without a buffer, whose lock this thread would hold when Python ends.
    lines = io.FileIO(0, closefd=False)
    for line in iter(lines.readline, b""):
        stopped.append(int(line))
    stopped.append(SIGHUP)


class Host:
    """This host of a job; on the first one also the verdict on all.

    Args:
        meeting: All hosts of the job.
        place: Number of this host, and number of hosts.
        store: The job's store, on the first host.
        restarts: The largest number of restarts.
        is_quiet: Whether the first host prints to the same screen.
    """

    def __init__(
        self,
        meeting: Meeting,
        place: Place,
        store: Store | None,
        restarts: int,
        *,
        is_quiet: bool,
    ) -> None:
        self._meeting, self._store, self._restarts = meeting, store, restarts
        self._number, self._num_hosts = place.rank, place.size
        self._is_quiet = is_quiet
        # Name and number of ranks of each host; and an address of the first one.
        self._hosts: list[tuple[str, int]] = []
        self._way = LOOPBACK

    def join(self, description: Sequence[Any], is_importing: bool | None) -> None:
        """Wait until all hosts have come.

        Args:
            description: Name and number of ranks of this host, and the address of the
                store by which it is reached here.
            is_importing: Whether the ranks will import TensorFlow, as far as is known;
                `None` to say nothing about the start.
        """

        def combine(descriptions: Sequence[Any]) -> dict[str, Any]:
            hosts = list[tuple[str, int]]()
            for number, (name, count, _) in enumerate(descriptions):
                # There may be several launchers of one machine.
                is_new = name not in dict(hosts)
                hosts.append((name if is_new else f"{name}-{number}", count))
            if is_importing is not None:  # nothing else says something, for seconds
                where = hosts[0][0] if self._is_quiet else "this host"
                where = where if len(hosts) == 1 else f"{len(hosts)} hosts"
                count = sum(count for _, count in hosts)
                text = f"keras-dist: {count} rank{'s' * (count > 1)} on {where}"
                print_message(text + ", importing TensorFlow" * is_importing)
            assert self._store is not None
            self._store.open(assign_ranks(hosts))
            ways = [way for *_, way in descriptions if not is_loopback(way)]
            return {"hosts": hosts, "way": ways[0] if ways else LOOPBACK}

        advice = (
            "Start the same command on each of them; each has to reach the address and "
            "port of `--rdzv`."
        )
        found = self._meeting.join(
            description, combine, timeout=_TIMEOUT, advice=advice
        )
        self._hosts = [(name, count) for name, count in found["hosts"]]
        self._way = found["way"]

    def run(
        self,
        command: Command,
        job: str,
        secret: str,
        variables: Mapping[str, str],
        address: str,
    ) -> int:
        """Run the ranks of this host until the job has ended; return its exit code.

        Args:
            command: The command that the ranks run.
            job: Id of the processes that this host starts.
            secret: Secret of the job.
            variables: Variables by which ranks find the store.
            address: Address of this host on the network to the store.
        """
        nonce = self._meeting.nonce
        seed = str(int(derived(nonce, "seed")[:8], 16))  # after a restart, too
        seed = os.environ.get(seeds.VARIABLE) or seed
        if is_loopback(address):
            address = self._way  # as the other hosts see this one
        for start in itertools.count():
            own = {SECRET: derived(secret, f"ranks {nonce} {start}")}
            own |= {RESTART: str(start)} if start else {}
            try:
                report = run_ranks(
                    command,
                    [s for s in assign_ranks(self._hosts) if s.hostname == self._name],
                    {**variables, **interface(address), seeds.VARIABLE: seed, **own},
                    job,
                    stop=partial(self._stop, f"report.{start}"),
                )
            except (OSError, RuntimeError, ValueError) as error:
                report = Report(error=str(error))
            if self._meeting.is_cut:
                return 128 + SIGHUP
            signal = self._meeting.signals.get(self._number, 0)
            end = self._meeting.gather(
                f"report.{start}",
                replace(report, signal=signal).values(),
                partial(self._judge, start),
            )
            if not end["again"]:
                break
        if self._number and not self._is_quiet and end["line"]:
            print_message(end["line"])
        return int(end["code"])

    @property
    def _name(self) -> str:
        return self._hosts[self._number][0]

    def _stop(self, reports: str) -> int:
        """Return the number of the signal that ends the ranks now; 0 for none."""
        signals = self._meeting.signals
        if self._number in signals:
            return signals[self._number]
        if saving := list(filter(is_saving, signals.values())):
            return saving[0]
        have_failed = not all(r["finished"] for r in self._meeting.find(reports))
        return ORDERED if signals or have_failed or self._meeting.lost else 0

    def _judge(self, start: int, values: Sequence[Any]) -> dict[str, Any]:
        """On the first host, make the verdict: code, its first line, and what next."""
        reports = {k: parse_report(v) for k, v in enumerate(values) if v is not None}
        stops = [(k, report.signal) for k, report in reports.items() if report.signal]
        is_lost = len(reports) < len(values)
        code, text = 0, ""
        if stops:
            code, text = self._describe_stop(*stops[0], reports)
        elif is_lost or not all(report.finished for report in reports.values()):
            code, text = self._describe_failure(reports)
        is_again = code != 0 and not stops and not is_lost and start < self._restarts
        if text:
            print_message(text)
        if is_again:
            count = self._restarts + 1
            print_message(f"keras-dist: start {start + 2} of at most {count}.")
            assert self._store is not None
            self._store.open(assign_ranks(self._hosts))
        line, _, more = text.partition("\n")
        if more:
            line = f"{line} All of it is in the output of {self._name}."
        return {"code": code, "line": line, "again": is_again}

    def _describe_stop(
        self, number: int, signal: int, reports: Mapping[int, Report]
    ) -> tuple[int, str]:
        """Return exit code and message of a job that a signal has ended."""
        has_saved = len(reports) == self._num_hosts
        has_saved = has_saved and all(each.saved for each in reports.values())
        is_named = self._num_hosts > 1 and not self._is_quiet
        where = self._hosts[number][0] if is_named else ""
        code = 128 + signal
        if has_saved and "SLURM_JOB_ID" in os.environ:
            code = processes.SAVED  # so that the job's script requeues it
        return code, stopped_text(signal, has_saved=has_saved, host=where)

    def _describe_failure(self, reports: Mapping[int, Report]) -> tuple[int, str]:
        """Return exit code and message of a job in which ranks or hosts have failed."""
        causes, lost_ranks, where = list[str](), list[int](), dict[int, str]()
        slots = assign_ranks(self._hosts)
        for k, (name, _) in enumerate(self._hosts):
            ranks = [slot.rank for slot in slots if slot.hostname == name]
            where.update(dict.fromkeys(ranks, name if self._num_hosts > 1 else ""))
            if k not in reports:
                lost_ranks += ranks
                causes.insert(0, lost_text(name, ranks))
            elif error := reports[k].error:
                is_one = self._num_hosts == 1
                named = f"no ranks could be run on {name}: {error}"
                causes.append(error if is_one else named)
        text, code = verdict(
            list(reports.values()),
            causes[0] if causes else "",
            hosts=where,
            unknown=lost_ranks,
        )
        return code, text
