"""The ranks of one host: start them, watch them, end them and all they have started."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1

import psutil

from keras_dist.launch.failures import RankEnd, Report
from keras_dist.launch.monitor import rank_process, record
from keras_dist.launch.output import Output
from keras_dist.launch.store import Slot

# The variable with the number of the restart, from 1; not set in the first run.
RESTART = "KERAS_DIST_RESTART"

# Seconds to wait after the first failure, in which other ranks may fail and report.
_GRACE = 3.0

# Seconds between SIGTERM and SIGKILL; and if the launcher itself got a signal, by a
# scheduler, a closed terminal or Ctrl-C, because the ranks then save.
_END_SECONDS, _SAVE_SECONDS = 2.0, 30.0
_TICK = 0.1

# Seconds to wait after SIGKILL.
_KILL_SECONDS = 5.0

# Signals that stop a job; and what ends the ranks where others have failed.
_STOPS, FAILED = (SIGINT, SIGTERM, SIGHUP), -1

# Variables of libraries that by default use all cores in each rank.
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Command:
    """The command that every rank runs.

    Args:
        kind: "script", "module" or "program".
        words: The file, module or program, and its arguments.
        log_dir: Folder for a log file of each rank; `None` for none.
    """

    kind: str
    words: Sequence[str]
    log_dir: str | None = None


def parse_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of a command (script, module, program), and its words.

    `python script.py` counts as a script, so that its errors are reported.
    """
    first, *rest = words
    program = shutil.which(first)
    # Not the resolved path, which is the same in several environments.
    folder = Path(program or "").absolute().parent
    if folder == Path(sys.executable).parent and Path(first).name.startswith("python"):
        if rest[:1] == ["-m"] and rest[1:]:
            return "module", rest[1:]
        if rest and rest[0].endswith(".py"):
            first, *rest = rest
    if first.endswith(".py") and Path(first).is_file():
        return "script", [first, *rest]
    if program is None:
        raise ValueError(f"There is no such script or program. Received: {first}")
    return "program", list(words)


def run_ranks(
    command: Command,
    slots: Sequence[Slot],
    variables: Mapping[str, str],
    job: str,
    *,
    stop: Callable[[], int],
) -> Report:
    """Run the ranks of this host until all have ended, one failed, or it is stopped.

    Args:
        command, slots: The command that they run, and the slot of each rank.
        variables: Environment variables that all ranks of the host have in common.
        job: Id of the job, by which their processes are found.
        stop: Returns the number of a signal that ends the ranks, or 0. They get SIGINT
            for SIGINT, else SIGTERM; and SIGKILL if they are still there after a while,
            so that they can save, but soon if it is `FAILED`, and at once if it is that
            of SIGKILL.
    """
    ranks = _Ranks(command, variables, job)
    try:
        for slot in slots:
            ranks.start(slot)
        ends = ranks.wait(stop)
    finally:
        have_saved = ranks.end(stop)
    return Report(ends, have_saved)


class _Ranks:
    """The processes of the ranks that run on this host."""

    def __init__(
        self, command: Command, variables: Mapping[str, str], job: str
    ) -> None:
        self._command, self._variables, self._job = command, variables, job
        # The record and the report of each rank: files without names, which ranks open
        # by the descriptors of this process, as no other account can.
        self._files = contextlib.ExitStack()
        self._paths: dict[int, tuple[str, str]] = {}
        self._output = Output(command.log_dir)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._end_times: dict[int, float] = {}

    def start(self, slot: Slot) -> None:
        """Start the process of a rank."""
        rank, local_size = int(slot["HOROVOD_RANK"]), int(slot["HOROVOD_LOCAL_SIZE"])
        paths = self._make_file(record.EMPTY), self._make_file(b"")
        self._paths[rank] = record_path, report_path = paths
        threads = max(1, len(os.sched_getaffinity(0)) // local_size)
        environment = {
            **dict.fromkeys(_THREADS, str(threads)),
            "TF_CPP_MIN_LOG_LEVEL": "1",  # no information
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **self._variables,
            **slot,
            job_variable(self._job): "1",
            record.VARIABLE: record_path,
            rank_process.REPORT_VARIABLE: report_path,
            **({} if self._command.log_dir else {rank_process.QUIET: "1"}),
        }
        runner = [sys.executable, rank_process.__file__, str(os.getpid())]
        process = subprocess.Popen(
            [*runner, self._command.kind, *self._command.words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches only the launcher
        )
        self._processes[rank] = process
        self._output.add(rank, process.stdout, process.stderr)

    def wait(self, stop: Callable[[], int]) -> list[RankEnd]:
        """Wait until all have ended, one has failed, or `stop` returns a number."""
        failed_at = None
        while not stop() and len(self._end_times) < len(self._processes):
            self._output.pass_on(_TICK)
            now = time.monotonic()
            if any(end.code for end in self._find_ends()):
                failed_at = failed_at or now
                if now - failed_at > _GRACE:
                    break
        return self._find_ends()

    def _find_ends(self) -> list[RankEnd]:
        return [self._find_end(rank) for rank in self._processes]

    def _find_end(self, rank: int) -> RankEnd:
        """Return what has become of a rank so far."""
        record_path, report_path = self._paths[rank]
        position = record.read(record_path)
        report = Path(report_path).read_text(errors="replace")
        code, now = self._processes[rank].poll(), time.time()
        ended = 0.0 if code is None else self._end_times.setdefault(rank, now)
        # A rank that has written its report may still run, or be ended before its exit.
        if report.startswith("{") and "\n" in report:
            return RankEnd(rank, str(position), **json.loads(report.splitlines()[0]))
        if code is None:
            return RankEnd(rank, str(position))
        summary = _describe_code(code) if code else position.describe_exit()
        text = f"{report}It {summary}."
        code = code if code >= 0 else 128 - code
        return RankEnd(rank, str(position), code, ended, summary, text)

    def end(self, stop: Callable[[], int]) -> bool:
        """End all processes of the job on this host; `stop` is that of `run_ranks`.

        Returns:
            Whether all ranks were asked to end, and ended together.
        """
        number = stop()
        end = time.monotonic() + (_SAVE_SECONDS if number > 0 else _END_SECONDS)
        running = [p for p in self._processes.values() if p.poll() is None]
        for process in running:
            if number == SIGINT:  # to all processes in its session, as from a terminal
                os.killpg(process.pid, SIGINT)
            else:
                process.terminate()
        while any(p.poll() is None for p in running) and time.monotonic() < end:
            if stop() == SIGKILL:
                break
            self._output.pass_on(_TICK, holds=False)
        for process in running:  # also where the variables of the job are not passed on
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, SIGKILL)
        _kill(self._job)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)
        have_saved = all(end.is_saved for end in self._find_ends())
        self._files.close()
        self._output.close()
        return have_saved

    def _make_file(self, content: bytes) -> str:
        """Make a file without a name; return a path for processes of this user."""
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see `end`
        self._files.enter_context(file).write(content)
        return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _describe_code(returncode: int) -> str:
    """Return how a rank ended that wrote no report."""
    if returncode > 0:
        return f"ended with exit code {returncode}, and without a Python error"
    try:
        text = f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
    if returncode == -SIGKILL:
        text += ", as the kernel does when memory runs out (dmesg then says so)"
    return text


def job_variable(job: str) -> str:
    """Return the name of an environment variable that all processes of a job have.

    All processes that a rank starts inherit it, even daemons, which leave the session
    of the rank. The id of the job is in the name, and not the value: so the processes
    of a job that was started inside another job have the variables of both.
    """
    return f"KERAS_DIST_JOB_{job}"


def _kill(job: str) -> None:
    """Kill all processes of a job, of this user on this host."""
    name, end = job_variable(job), time.monotonic() + _KILL_SECONDS
    # Repeatedly, since a process may start another one in the meantime.
    while time.monotonic() < end:
        found = psutil.process_iter(["environ"])
        left = [each for each in found if name in (each.info["environ"] or ())]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):  # it has ended
                process.kill()
        time.sleep(0.02)


@contextlib.contextmanager
def reaper(job: str) -> Iterator[None]:
    """Context manager that ends the processes of a job even if this one is killed.

    The reaper is a forked process. It waits until this process leaves the block or
    ends, for whatever reason, and then kills the processes of the job that are left.
    Call it before the first thread is started, because it forks.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _reap(job, reader)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(pid, 0)


def _reap(job: str, reader: int) -> None:
    """In the forked process, wait until the pipe is closed, and end the job."""
    try:
        os.setsid()
        for number in (*_STOPS, SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(reader, 0)
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        # Close all inherited files. The write end of the pipe above all: as long as it
        # is open here, the read below never returns.
        os.closerange(3, 1 << 16)
        os.read(0, 1)
        _kill(job)
    finally:
        os._exit(0)


def note_signals(*others: signal.Signals) -> list[int]:
    """Return a list to which signals that stop a job are appended from now on.

    They are Ctrl-C, SIGTERM, SIGHUP and others; they do not end this process. By
    `nohup` it ignores SIGHUP.
    """
    stopped: list[int] = []
    for number in (*_STOPS, *others):
        if number != SIGHUP or signal.getsignal(SIGHUP) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: stopped.append(number))
    return stopped
