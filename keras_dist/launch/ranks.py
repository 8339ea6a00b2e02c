"""The ranks of one host: start them, watch them, end them."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_dist.launch import processes
from keras_dist.launch.failures import Failure, failure_of, first_of
from keras_dist.launch.hosts import Slot
from keras_dist.launch.monitor import rank_process, record, stacks
from keras_dist.launch.output import Output
from keras_dist.launch.signals import is_ordered, is_saving
from keras_dist.launch.spares import Spares, popen

# Seconds to wait after the first failure, in which other ranks may fail and report.
_GRACE = 3.0

# Seconds between SIGTERM and SIGKILL: the first number after a failure or Ctrl-C; the
# second where the first host orders the end, because another host has failed or was
# lost, for which these ranks wait in a collective; the third if the launcher itself got
# SIGTERM, as from a scheduler, because the ranks then save a checkpoint.
_END_SECONDS, _ORDERED_SECONDS, _SAVE_SECONDS = 2.0, 1.0, 30.0
_TICK = 0.1

# Variables of libraries that by default use all cores in each rank.
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Command:
    """The command that every rank runs.

    Args:
        kind: "script", "module" or "program".
        words: The file, module or program, and its arguments.
        environment: Variables to set in addition to those of this process.
        log_dir: Folder for a log file of each rank; `None` for none.
        transport: "mpi" if the ranks, all on this machine, find each other by MPI.
        may_use_gloo: Whether they use Gloo if the server of MPI does not start.
    """

    kind: str
    words: Sequence[str]
    environment: Mapping[str, str]
    log_dir: str | None = None
    transport: str = "gloo"
    may_use_gloo: bool = False


class Ranks:
    """The ranks of a job that run on this host.

    Args:
        command: The command that they run.
        slots: The slot of each rank.
        job: Id of the job, by which its processes are found.
        spares: Processes that become ranks at a start; `None` for none.
        own: Variables that single ranks need in addition.
    """

    def __init__(
        self,
        command: Command,
        slots: Sequence[Slot],
        job: str,
        spares: Spares | None = None,
        own: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self._command, self._slots, self._job = command, slots, job
        self._spares = spares if command.kind != "program" else None
        self._own = own or {}
        # Record and report files; only this user can read them.
        self._folder = processes.make_folder(job)
        self._has_saved = False
        self._output = Output(slots[0].size, command.log_dir)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # For each rank that has ended: when, and the most memory it used, in KiB.
        self._ended: dict[int, tuple[float, int]] = {}

    def start(self) -> None:
        """Start every rank."""
        for slot in self._slots:
            process = self._started(slot)
            self._processes[slot.rank] = process
            self._output.add(slot.rank, process.stdout, process.stderr)

    def wait(self, stopped: Sequence[int]) -> list[Failure]:
        """Wait until all ranks have ended, or one has failed, or the job is stopped.

        Args:
            stopped: The wait ends as soon as this list is not empty.

        Returns:
            The failures, the first one first.
        """
        failed_at, begin = None, time.monotonic()
        while not stopped and len(self._ended) < len(self._processes):
            self._output.pass_on(_TICK)
            self._poll()
            now = time.monotonic()
            if failed_at is None and self._failures():
                failed_at = now
            if failed_at is not None and now - failed_at > _GRACE:
                break
            if self._spares is not None:
                common = self._environment(self._slots[0])
                self._spares.keep(len(self._slots), common, now - begin)
        return first_of(self._failures())

    def end(self, stopped: Sequence[int]) -> None:
        """End all processes of the job on this host, and remove its files.

        Args:
            stopped: Numbers of the signals that end the job; empty for none.
        """
        seconds = _END_SECONDS
        if is_saving(stopped):
            seconds = _SAVE_SECONDS
        elif is_ordered(stopped):
            seconds = _ORDERED_SECONDS
        running = [p.pid for r, p in self._processes.items() if r not in self._ended]
        keep = [] if self._spares is None else self._spares.pids
        processes.end(
            self._job,
            running,
            seconds=seconds,
            keep=keep,
            wait=self._pass_on_for,
        )
        for process in self._processes.values():
            if process.returncode is None:
                process.wait()
        saved = [failure.is_saved for failure in self._failures()]
        self._has_saved = len(saved) == len(self._slots) and all(saved)
        try:
            self._output.close()
        finally:  # whoever reads the output may have been killed
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def have_finished(self) -> bool:
        """Whether all ranks have ended by themselves, with exit code 0."""
        return all(process.returncode == 0 for process in self._processes.values())

    @property
    def has_saved(self) -> bool:
        """Whether, at their end, all ranks were asked to end and have saved."""
        return self._has_saved

    def where(self) -> dict[int, str]:
        """Positions in words: epoch, step and collective of each rank, now or last.

        Ranks that have ended with exit code 0 are left out.
        """
        self._request_stacks()
        return {
            rank: self._position(rank)
            for rank, process in self._processes.items()
            if process.returncode != 0
        }

    def _pass_on_for(self, seconds: float) -> None:
        """Pass on output for so long, also where nobody reads the screen any more."""
        with contextlib.suppress(OSError):
            self._output.pass_on_for(seconds)

    def _started(self, slot: Slot) -> subprocess.Popen[bytes]:
        """Start the process of one rank."""
        record.make(self._path(slot.rank, "record"))
        environment = self._environment(slot) | {
            record.VARIABLE: str(self._path(slot.rank, "record")),
            rank_process.REPORT_VARIABLE: str(self._path(slot.rank, "report")),
        }
        own = self._command.kind, self._command.words, environment
        spare = None if self._spares is None else self._spares.take(*own)
        return spare or popen(*own)

    def _environment(self, slot: Slot) -> dict[str, str]:
        """The environment of a rank, but for its files."""
        environment = {
            **{name: str(_threads(slot)) for name in _THREADS},
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **self._command.environment,
            **slot.environment(),
            **self._own.get(slot.rank, {}),
            processes.mark(self._job): "1",
        }
        if self._command.log_dir is None:
            environment[rank_process.QUIET] = "1"
        return environment

    def _poll(self) -> None:
        """Collect the exit codes of ranks that have ended."""
        for rank, process in self._processes.items():
            if rank in self._ended:
                continue
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                self._ended[rank] = time.time(), used.ru_maxrss

    def _failures(self) -> list[Failure]:
        failures = []
        for rank, process in self._processes.items():
            ended_at, memory = self._ended.get(rank, (None, 0))
            failure = failure_of(
                rank,
                process.returncode,
                path=self._path(rank, "report"),
                ended_at=ended_at,
                memory=memory,
            )
            if failure is not None:
                failures.append(failure)
        return failures

    def _request_stacks(self) -> None:
        """Let running ranks write their stacks, and wait for it, at most a second."""
        paths = []
        for rank, process in self._processes.items():
            path = self._path(rank, "report.stacks")
            if rank not in self._ended and path.exists():
                process.send_signal(rank_process.DUMP_SIGNAL)
                paths.append(path)
        begin = time.monotonic()
        while any(not p.stat().st_size for p in paths) and (
            time.monotonic() - begin < 1
        ):
            time.sleep(0.02)

    def _position(self, rank: int) -> str:
        position = str(record.read(self._path(rank, "record")))
        dump = self._path(rank, "report.stacks")
        line = stacks.line_of(dump.read_text()) if dump.exists() else None
        return f"{position} ({line})" if line else position

    def _path(self, rank: int, name: str) -> Path:
        return self._folder / f"{rank}.{name}"


def _threads(slot: Slot) -> int:
    return max(1, len(os.sched_getaffinity(0)) // slot.local_size)
