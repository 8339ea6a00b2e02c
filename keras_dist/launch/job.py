"""A job on one host or on several: one launcher on each, and the store on the first.

All launchers run the same lines: they meet, each runs the ranks of its host, processes
of `monitor/rank_process.py`, which runs the script, and gives the others its report.
The first one makes the verdict of the reports of all.
"""

import io
import itertools
import os
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from keras_dist.clusters import Place
from keras_dist.launch.failures import Report, describe_failure, parse_report
from keras_dist.launch.meeting import CUT, Interrupted, Meeting
from keras_dist.launch.monitor.rank_process import SEED, THREADS
from keras_dist.launch.output import SCREEN, print_message
from keras_dist.launch.ranks import (
    FAILED,
    RESTART,
    Command,
    note_signals,
    run_ranks,
)
from keras_dist.launch.store import make_slots
from keras_dist.launch.time_limits import TimeLimits

# The exit code of a job to be run again; `checkpoint.EXIT_CODE` is the same.
_SAVED = 75


def run_job(
    command: Command,
    place: Place,
    num_ranks: int,
    secret: str,
    *,
    restarts: int = 0,
    over_ssh: bool = False,
) -> int:
    """Run this host's part of a job, and end every process that it has started.

    Args:
        command: The command that every rank runs.
        place: Number of this host, number of hosts, and where the first host is.
        num_ranks: Number of ranks of this host.
        secret: Secret of the job.
        restarts: The largest number of restarts; that of the first host counts.
        over_ssh: Whether standard input has the numbers of signals, and its end means
            that the command which has started this one is gone.

    Returns:
        The exit code of the job, the same on all hosts: 0, or that of the rank that
        failed first, or 128 + the number of the signal that stopped the job.

    Raises:
        OSError: If the port is in use.
        ValueError: If the hosts cannot meet.
    """
    name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    limits = TimeLimits()
    stopped = note_signals()
    if over_ssh:
        threading.Thread(target=_read_signals, args=[stopped], daemon=True).start()
    meeting = Meeting(
        place,
        secret,
        kind="host",
        name=name,
        timeout=limits.ssh if over_ssh and place.rank else limits.hosts,
        stopped=stopped,
    )
    try:
        with meeting:
            own = [name, num_ranks, len(os.sched_getaffinity(0)) // num_ranks]
            told = meeting.join(own, lambda all_: {"hosts": all_})["hosts"]
            bounds = itertools.accumulate(count for _, count, _ in told)
            ranks = [
                (name, range(end - count, end))
                for (name, count, _), end in zip(told, bounds, strict=True)
            ]
            threads = max(1, min(threads for *_, threads in told))
            host = _Host(meeting, ranks, place.rank, threads, restarts, over_ssh)
            return host.run(command)
    except Interrupted as error:
        number = int(error.args[0])
        print_message(_describe_stop(number))
        return 128 + number
    finally:
        SCREEN.leave(stopped)


def _read_signals(stopped: list[int]) -> None:
    """In a thread, read what `launch.ssh` writes, to the end of the connection."""
    # Without a buffer, whose lock this thread would hold when Python ends.
    lines = io.FileIO(0, closefd=False)
    for line in iter(lines.readline, b""):
        stopped.append(int(line))
    stopped.extend([signal.SIGHUP, CUT])


def _describe_stop(number: int, where: str = "", *, has_saved: bool = False) -> str:
    saved = "; the ranks ended together, and the same command continues the training"
    name = signal.Signals(number).name
    return f"keras-dist: ended by {name}{where}{saved if has_saved else ''}."


@dataclass(frozen=True)
class _Host:
    """This host of a job; on the first one also the verdict on all.

    Args:
        meeting: All hosts of the job.
        hosts: Name and ranks of each host.
        number: Number of this host.
        threads: Threads of each rank.
        restarts: The largest number of restarts.
        is_quiet: Whether the first host prints to the same screen.
    """

    meeting: Meeting
    hosts: Sequence[tuple[str, range]]
    number: int
    threads: int
    restarts: int
    is_quiet: bool

    def run(self, command: Command) -> int:
        """Run ranks until the job has ended; return its exit code."""
        counts = [(name, len(ranks)) for name, ranks in self.hosts]
        slots = make_slots(
            [(name, index, count) for name, count in counts for index in range(count)]
        )
        seed = str(int(self.meeting.nonce[:8], 16))  # after a restart, too
        # Python's own decides the order of a set of text, such as a vocabulary.
        names = SEED, "PYTHONHASHSEED"
        variables = {name: os.environ.get(name) or seed for name in names}
        variables[THREADS] = str(self.threads)
        for start in itertools.count():
            if start:
                variables[RESTART] = str(start)
            try:
                report = run_ranks(
                    command,
                    [slots[rank] for rank in self.hosts[self.number][1]],
                    {**self.meeting.rank_variables(start), **variables},
                    stop=partial(self._find_stop, f"report.{start}"),
                )
            except (OSError, RuntimeError, ValueError) as error:
                report = Report(error=str(error))
            if self.meeting.is_cut:
                return 128 + signal.SIGHUP
            received, *_ = self.meeting.signals.get(self.number, [0])
            end = self.meeting.gather(
                f"report.{start}",
                asdict(replace(report, signal=received)),
                partial(self._judge, start),
            )
            if not end["again"]:
                break
        if self.number and not self.is_quiet and end["line"]:
            print_message(end["line"])
        return int(end["code"])

    def _find_stop(self, reports: str) -> int:
        """Return the number of the signal that ends the ranks now; 0 for none."""
        signals = self.meeting.signals
        if any(numbers.count(signal.SIGINT) > 1 for numbers in signals.values()):
            return signal.SIGKILL
        if signals:
            return signals.get(self.number, next(iter(signals.values())))[0]
        found = map(parse_report, self.meeting.find(reports))
        have_failed = not all(report.is_finished for report in found)
        return FAILED if have_failed or self.meeting.lost else 0

    def _judge(self, start: int, values: Sequence[Any]) -> dict[str, Any]:
        """On the first host, make the verdict: code, its first line, and what next."""
        reports = [None if value is None else parse_report(value) for value in values]
        stops = [(k, r.signal) for k, r in enumerate(reports) if r and r.signal]
        code, text = 0, ""
        if stops:
            number, code = stops[0][0], 128 + stops[0][1]
            has_saved = all(report and report.saved for report in reports)
            if has_saved and "SLURM_JOB_ID" in os.environ:
                code = _SAVED  # so that the job's script requeues it
            is_named = len(values) > 1 and not self.is_quiet
            where = f" on {self.hosts[number][0]}" if is_named else ""
            text = _describe_stop(stops[0][1], where, has_saved=has_saved)
        elif not all(report and report.is_finished for report in reports):
            text, code = describe_failure(reports, self.hosts)
        # After SIGTERM the one who has sent it starts the job again.
        saved = [e for r in reports if r for e in r.ends if e.is_saved]
        is_over = code == 0 or stops or None in reports or (saved and code == _SAVED)
        is_again = not is_over and start < self.restarts
        if text:
            print_message(text)
        if is_again:
            count = self.restarts + 1
            print_message(f"keras-dist: start {start + 2} of at most {count}.")
        line, _, more = text.partition("\n")
        if more:
            line = f"{line} All of it is in the output of {self.hosts[0][0]}."
        return {"code": code, "line": line, "again": is_again}
