"""The ranks of one host: what they run, their variables, and their start and end."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_dist.launch import processes
from keras_dist.launch.failures import RankEnd, Report, find_end
from keras_dist.launch.hosts import is_here, num_gpus
from keras_dist.launch.monitor import rank_process, record
from keras_dist.launch.output import Output
from keras_dist.launch.processes import is_saving
from keras_dist.launch.store import Slot, assign_ranks

# The variable with the number of the restart, from 1; not set in the first run.
RESTART = "KERAS_DIST_RESTART"

# Seconds to wait after the first failure, in which other ranks may fail and report.
_GRACE = 3.0

# Seconds between SIGTERM and SIGKILL; and if the launcher itself got SIGTERM, as from a
# scheduler, because the ranks then save a checkpoint.
_END_SECONDS, _SAVE_SECONDS = 2.0, 30.0
_TICK = 0.1

# TensorFlow's level of logging, from which on routine lines are left out.
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"

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

    Raises:
        ValueError: If there is no such file or program.
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
        stop: Returns the number of a signal that ends the ranks, or 0. They get
            SIGTERM, and SIGKILL if they are still there after a while, which is longest
            after SIGTERM, so that they can save.
    """
    ranks = _Ranks(command, variables, job)
    try:
        for slot in slots:
            ranks.start(slot)
        ends = ranks.wait(stop)
    finally:
        have_saved = ranks.end(stop())
    return Report(ends, have_saved)


class _Ranks:
    """The processes of the ranks that run on this host."""

    def __init__(
        self, command: Command, variables: Mapping[str, str], job: str
    ) -> None:
        self._command, self._variables, self._job = command, variables, job
        # Record and report files; only this user can read them.
        self._folder = processes.find_folder(job)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._output = Output(command.log_dir)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._end_times: dict[int, float] = {}

    def start(self, slot: Slot) -> None:
        """Start the process of a rank."""
        record.make(self._path(slot.rank, "record"))
        threads = max(1, len(os.sched_getaffinity(0)) // slot.local_size)
        environment = {
            **dict.fromkeys(_THREADS, str(threads)),
            _LOG_LEVEL: "1",
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **self._variables,
            **slot.variables(),
            processes.mark(self._job): "1",
            record.VARIABLE: str(self._path(slot.rank, "record")),
            rank_process.REPORT_VARIABLE: str(self._path(slot.rank, "report")),
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
        self._processes[slot.rank] = process
        self._output.add(slot.rank, process.stdout, process.stderr)

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
        for rank, process in self._processes.items():
            if process.poll() is not None:
                self._end_times.setdefault(rank, time.time())
        return [
            find_end(
                rank,
                process.returncode,
                position=record.read(self._path(rank, "record")),
                path=self._path(rank, "report"),
                time=self._end_times.get(rank, 0.0),
            )
            for rank, process in self._processes.items()
        ]

    def end(self, signal: int) -> bool:
        """End all processes of the job on this host, by a signal or none.

        Returns:
            Whether all ranks were asked to end, and have saved.
        """
        seconds = _SAVE_SECONDS if is_saving(signal) else _END_SECONDS
        running = [p.pid for p in self._processes.values() if p.poll() is None]
        processes.end(self._job, running, seconds=seconds, wait=self._pass_on_for)
        for process in self._processes.values():
            process.wait()
        have_saved = all(end.is_saved for end in self._find_ends())
        try:
            self._output.close()
        finally:  # whoever reads the output may have been killed
            shutil.rmtree(self._folder, ignore_errors=True)
        return have_saved

    def _pass_on_for(self, seconds: float) -> None:
        """Pass on output for so long, also where nobody reads the screen any more."""
        with contextlib.suppress(OSError):
            self._output.pass_on_for(seconds)

    def _path(self, rank: int, name: str) -> Path:
        return self._folder / f"{rank}.{name}"


def dry_run_text(command: Command, hosts: Mapping[str, int]) -> str:
    """Say what a launcher would start; no hosts are known where they have to meet."""
    python = {"script": "python ", "module": "python -m ", "program": ""}
    lines = [f"command    {python[command.kind]}{shlex.join(command.words)}"]
    if not hosts:
        lines.append("ranks      known when the hosts have met")
    for slot in assign_ranks(list(hosts.items())):
        device = f"GPU {slot.local_rank} if its host has GPUs, else CPU"
        if is_here(slot.hostname):
            device = f"GPU {slot.local_rank}" if num_gpus() else "CPU"
        lines.append(f"rank {slot.rank:<6}{slot.hostname}, {device}")
        variables = " ".join(f"{n}={v}" for n, v in slot.variables().items())
        lines.append(f"{'':11}{variables}")
    lines.append("Nothing was started.")
    return "\n".join(lines)
