"""The ranks of one host: start them, watch them, end them and all they have started."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCHLD, SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1
from typing import IO

from keras_dist.launch.failures import RankEnd, Report
from keras_dist.launch.monitor import rank_process, record
from keras_dist.launch.output import Output
from keras_dist.launch.store import Slot
from keras_dist.launch.time_limits import TimeLimits

# The variable with the number of the restart, from 1; not set in the first run.
RESTART = "KERAS_DIST_RESTART"

# Seconds to wait after the first failure, in which other ranks may fail and report.
_GRACE = 3.0

# Seconds between SIGTERM and the end where another rank has failed; and to wait after
# SIGKILL.
_END_SECONDS, _KILL_SECONDS, _TICK = 2.0, 5.0, 0.1

# What ends the ranks where others have failed, in place of a signal.
FAILED = -1

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
    *,
    stop: Callable[[], int],
) -> Report:
    """Run the ranks of this host until all have ended, one failed, or it is stopped.

    Args:
        command, slots: The command that they run, and the slot of each rank.
        variables: Environment variables that all ranks of the host have in common.
        stop: Returns the number of a signal that ends the ranks, or 0. They get SIGINT
            for SIGINT, else SIGTERM; and SIGKILL if they are still there after a while,
            so that they can save, but soon if it is `FAILED`, and at once if it is that
            of SIGKILL.
    """
    output, ranks = Output(command.log_dir), list[_Rank]()
    failed_at = None
    rank_process.adopt_orphans()  # where the parent of a rank is killed
    try:
        for slot in slots:
            ranks.append(rank := _start(command, slot, variables))
            output.add(rank.number, rank.process.stdout, rank.process.stderr)
        while not stop() and not all(rank.ended for rank in ranks):
            output.pass_on(_TICK)
            ends = [rank.find_end() for rank in ranks]
            if any(end.code for end in ends):
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > _GRACE:
                    break
        ends = [rank.find_end() for rank in ranks]
    finally:
        _end([rank.process for rank in ranks], output, stop)
    return Report(ends, all(rank.find_end().is_saved for rank in ranks))


@dataclass
class _Rank:
    """A rank: its process, its record, and when its end was seen, as of `time.time`."""

    number: int
    process: subprocess.Popen[bytes]
    record: IO[bytes]
    ended: float = 0.0

    def find_end(self) -> RankEnd:
        """Return what has become of the rank so far."""
        position, report = record.read(self.record.fileno())
        code = self.process.poll()
        if code is not None:
            self.ended = self.ended or time.time()
        # A rank that has written its report may still run, or be ended before its exit.
        if report.startswith("{") and "\n" in report:
            known = json.loads(report.splitlines()[0])
            return RankEnd(self.number, str(position), **known)
        if code is None:
            return RankEnd(self.number, str(position))
        code = code if code >= 0 else 128 - code
        summary = _describe_code(code) if code else position.describe_exit()
        text = f"{report}It {summary}."
        return RankEnd(self.number, str(position), code, self.ended, summary, text)


def _start(command: Command, slot: Slot, variables: Mapping[str, str]) -> _Rank:
    """Start a rank, as a child of a small process that ends all it has started."""
    (file := record.make_file()).write(record.EMPTY)
    environment = {
        **dict.fromkeys(_THREADS, variables[rank_process.THREADS]),
        "TF_CPP_MIN_LOG_LEVEL": "1",  # no information
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **variables,
        **slot,
        rank_process.RECORD: record.name_file(file),
        **({} if command.log_dir else {rank_process.QUIET: "1"}),
    }
    runner = [sys.executable, rank_process.__file__, str(os.getpid())]
    process = subprocess.Popen(
        [*runner, command.kind, *command.words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C reaches only the launcher
    )
    return _Rank(int(slot["HOROVOD_RANK"]), process, file)


def _end(
    processes: Sequence[subprocess.Popen[bytes]],
    output: Output,
    stop: Callable[[], int],
) -> None:
    """End ranks, and all that they have started; `stop` is as of `run_ranks`."""
    number = stop()
    end = time.monotonic() + (TimeLimits().save if number > 0 else _END_SECONDS)
    for process in processes:
        process.send_signal(SIGINT if number == SIGINT else SIGTERM)
    while any(each.poll() is None for each in processes) and time.monotonic() < end:
        if stop() == SIGKILL:
            break
        output.pass_on(_TICK, holds=False)
    for process in processes:
        process.send_signal(SIGHUP)  # which kills the rank and all below it
    for process in processes:
        try:
            process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    rank_process.end_children()
    output.close()


def _describe_code(code: int) -> str:
    """Return how a rank ended that wrote no report."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"ended with exit code {code}, and without a Python error"
    is_killed = name == "SIGKILL"
    hint = ", as the kernel does when memory runs out (dmesg then says so)"
    return f"was ended by {name}{hint if is_killed else ''}"


def note_signals() -> list[int]:
    """Return a list to which signals that stop a job are appended from now on.

    They are Ctrl-C, SIGTERM, SIGHUP and, under SLURM, SIGUSR1; they do not end this
    process. By `nohup` it ignores SIGHUP.
    """
    signal.signal(SIGCHLD, signal.SIG_DFL)  # ignored, it would hide all exit codes
    stopped: list[int] = []
    slurm = [SIGUSR1] * ("SLURM_JOB_ID" in os.environ)
    for number in (SIGINT, SIGTERM, SIGHUP, *slurm):
        if number != SIGHUP or signal.getsignal(SIGHUP) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: stopped.append(number))
    return stopped
