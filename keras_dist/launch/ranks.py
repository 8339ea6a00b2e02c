"""The ranks of one run, from their start to their end."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_dist.launch import processes
from keras_dist.launch.failures import Failure, failure_of, first_of
from keras_dist.launch.hosts import Slot
from keras_dist.launch.output import Output
from keras_dist.monitor import record, report, stacks

# Seconds in which the others, too, may say what has happened to them.
_GRACE = 3.0

# Seconds that ranks have between SIGTERM and SIGKILL: after a failure or Ctrl-C, and
# when the launcher itself was asked to end, as a scheduler does that wants the machine.
_END_SECONDS, _SAVE_SECONDS = 2.0, 30.0
_TICK = 0.1

# Libraries that take all cores for each rank, unless they are told otherwise.
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Command:
    """What every rank runs.

    Args:
        kind: "script", "module" or "program".
        words: The file, module or program, and its arguments.
        environment: Variables to set beside those of this process.
        log_dir: Where to write a file a rank.
    """

    kind: str
    words: Sequence[str]
    environment: Mapping[str, str]
    log_dir: str | None = None


class Ranks:
    """All ranks of one run, on this host.

    Args:
        command: What they run.
        slots: Of each rank.
        job: Number of the job, by which its processes are found again.
    """

    def __init__(self, command: Command, slots: Sequence[Slot], job: str) -> None:
        self._command, self._slots, self._job = command, slots, job
        self._folder = Path(tempfile.mkdtemp(prefix="keras_dist."))  # for this user
        self._output = Output(slots[0].size, command.log_dir)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # When each rank ended, and how much memory it had at most, in KiB.
        self._ended: dict[int, tuple[float, int]] = {}

    def start(self) -> None:
        """Start every rank."""
        for slot in self._slots:
            process = self._started(slot)
            self._processes[slot.rank] = process
            self._output.add(slot.rank, process.stdout, process.stderr)

    def wait(self, stopped: Sequence[int]) -> list[Failure]:
        """Wait until all ranks have ended, or one has failed; the failures in order.

        Args:
            stopped: Gets a member when the user wants to stop.
        """
        failed_at = None
        while not stopped and len(self._ended) < len(self._processes):
            self._output.pass_on(_TICK)
            self._look()
            now = time.monotonic()
            if failed_at is None and self._failures():
                failed_at = now
            if failed_at is not None and now - failed_at > _GRACE:
                break
        return first_of(self._failures())

    def end(self, *, is_saving: bool = False) -> None:
        """End whatever is left, and forget it; all processes are gone then.

        Args:
            is_saving: Whether ranks that are asked to end may save first.
        """
        seconds = _SAVE_SECONDS if is_saving else _END_SECONDS
        running = [p.pid for r, p in self._processes.items() if r not in self._ended]
        processes.end(self._job, running, seconds=seconds)
        for process in self._processes.values():
            if process.returncode is None:
                process.wait()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def where(self) -> dict[int, str]:
        """Where each rank is now, or was when it failed; not those that have ended."""
        self._ask_for_stacks()
        return {
            rank: self._where(rank)
            for rank, process in self._processes.items()
            if process.returncode != 0
        }

    def _started(self, slot: Slot) -> subprocess.Popen[bytes]:
        record.make(self._path(slot.rank, "record"))
        environment = {
            **{name: str(_threads(slot)) for name in _THREADS},
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **self._command.environment,
            **slot.environment(),
            processes.mark(self._job): "1",
            record.VARIABLE: str(self._path(slot.rank, "record")),
            report.VARIABLE: str(self._path(slot.rank, "report")),
        }
        if self._command.log_dir is None:
            environment[report.QUIET] = "1"
        begin = [sys.executable, report.__file__, str(os.getpid()), self._command.kind]
        return subprocess.Popen(
            begin + list(self._command.words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a key on the terminal reaches the launcher alone
        )

    def _look(self) -> None:
        for rank, process in self._processes.items():
            if rank in self._ended:
                continue
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                self._ended[rank] = time.time(), used.ru_maxrss

    def _failures(self) -> list[Failure]:
        found = []
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
                found.append(failure)
        return found

    def _ask_for_stacks(self) -> None:
        asked = []
        for rank, process in self._processes.items():
            path = self._path(rank, "report.stacks")
            if rank not in self._ended and path.exists():
                process.send_signal(report.DUMP_SIGNAL)
                asked.append(path)
        begin = time.monotonic()
        while any(not p.stat().st_size for p in asked) and (
            time.monotonic() - begin < 1
        ):
            time.sleep(0.02)

    def _where(self, rank: int) -> str:
        slot = str(record.read(self._path(rank, "record")))
        dump = self._path(rank, "report.stacks")
        line = stacks.line_of(dump.read_text()) if dump.exists() else None
        return f"{slot} ({line})" if line else slot

    def _path(self, rank: int, name: str) -> Path:
        return self._folder / f"{rank}.{name}"


def _threads(slot: Slot) -> int:
    return max(1, len(os.sched_getaffinity(0)) // slot.local_size)
