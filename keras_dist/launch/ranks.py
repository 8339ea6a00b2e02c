"""The ranks of one host: what they run, their variables, and their start and end."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keras_dist.launch import processes
from keras_dist.launch.failures import (
    Failure,
    Report,
    find_failure,
    print_message,
    sort_failures,
)
from keras_dist.launch.hosts import is_here, num_gpus
from keras_dist.launch.monitor import rank_process, record
from keras_dist.launch.output import Output
from keras_dist.launch.processes import ORDERED, is_saving
from keras_dist.launch.store import assign_ranks, slot_variables

# The variable with the number of the restart, from 1; not set in the first run.
RESTART = "KERAS_DIST_RESTART"

# Seconds for which a rank waits for the others to connect: importing TensorFlow may
# take a minute longer on one host than on another one.
_CONNECT, _CONNECT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS", 120

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
    """

    kind: str
    words: Sequence[str]
    environment: Mapping[str, str]
    log_dir: str | None = None


def parse_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of a command (script, module, program), and its words.

    `python script.py` counts as a script, so that its errors are reported.

    Raises:
        ValueError: If there is no such file or program.
    """
    found = Path(shutil.which(words[0]) or "")
    # Not the resolved path, which is the same in several environments.
    is_here = found.absolute().parent == Path(sys.executable).parent
    is_python = is_here and found.name.startswith("python")
    if is_python and words[1:2] == ["-m"] and len(words) > 2:
        return "module", list(words[2:])
    if is_python and words[1:] and words[1].endswith(".py"):
        words = words[1:]
    if words[0].endswith(".py") and Path(words[0]).is_file():
        return "script", list(words)
    if shutil.which(words[0]) is None:
        raise ValueError(f"There is no such script or program. Received: {words[0]}")
    return "program", list(words)


def connect_timeout() -> dict[str, str]:
    """Return the variable by which ranks wait for later ones, if it is not set."""
    return {} if _CONNECT in os.environ else {_CONNECT: str(_CONNECT_SECONDS)}


def run_ranks(
    command: Command,
    slots: Sequence[Any],
    variables: Mapping[str, str],
    job: str,
    *,
    stop: Callable[[], int],
) -> Report:
    """Run the ranks of this host until all have ended, one failed, or it is stopped.

    Args:
        command: The command that they run.
        slots: The slot of each rank.
        variables: Environment variables that all ranks of the host have in common.
        job: Id of the job, by which their processes are found.
        stop: Returns the number of a signal that ends the ranks, or 0. They get
            SIGTERM, and SIGKILL if they are still there after a while, which is longest
            after SIGTERM, so that they can save.
    """
    environment = {**command.environment, **variables}
    gpus, count = num_gpus({**os.environ, **environment}), len(slots)
    if 0 < gpus < count and RESTART not in variables:
        print_message(
            f"keras-dist: {count} ranks share {gpus} GPU{'s' * (gpus > 1)} of this "
            "host, and the memory there, which NCCL refuses. Start one for each GPU: "
            f"-np {gpus}"
        )
    ranks = _Ranks(replace(command, environment=environment), job)
    failures: list[Failure] = []
    where: dict[int, str] = {}
    try:
        for slot in slots:
            ranks.start(slot)
        failures = ranks.wait(stop)
        where = ranks.find_positions()
    finally:
        ranks.end(stop())
    has_finished = not failures and not where
    return Report(failures, where, ranks.have_saved, finished=has_finished)


class _Ranks:
    """The processes of the ranks that run on this host."""

    def __init__(self, command: Command, job: str) -> None:
        self._command, self._job = command, job
        # Record and report files; only this user can read them.
        self._folder = processes.make_folder(job)
        self._output = Output(command.log_dir)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # For each rank that has ended: when, and the most memory it used, in KiB.
        self._ended: dict[int, tuple[float, int]] = {}
        # Whether, at their end, all were asked to end and have saved.
        self.have_saved = False

    def start(self, slot: Any) -> None:
        """Start the process of a rank."""
        record.make(self._path(slot.rank, "record"))
        environment = _environment_of(self._command, slot) | {
            processes.mark(self._job): "1",
            record.VARIABLE: str(self._path(slot.rank, "record")),
            rank_process.REPORT_VARIABLE: str(self._path(slot.rank, "report")),
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

    def wait(self, stop: Callable[[], int]) -> list[Failure]:
        """Wait until all ranks have ended, one has failed, or `stop` returns a number.

        Returns:
            The failures, the first one first.
        """
        failed_at = None
        while not stop() and len(self._ended) < len(self._processes):
            self._output.pass_on(_TICK)
            self._collect_ends()
            now = time.monotonic()
            if failed_at is None and self.find_failures():
                failed_at = now
            if failed_at is not None and now - failed_at > _GRACE:
                break
        return sort_failures(self.find_failures())

    def find_positions(self) -> dict[int, str]:
        """Describe where each rank is, or was last, but those with exit code 0."""
        return {
            rank: str(record.read(self._path(rank, "record")))
            for rank, process in self._processes.items()
            if process.returncode != 0
        }

    def find_failures(self) -> list[Failure]:
        """Return how ranks have failed so far."""
        found = (
            find_failure(
                rank,
                process.returncode,
                path=self._path(rank, "report"),
                ended=self._ended.get(rank, (0.0, 0)),
            )
            for rank, process in self._processes.items()
        )
        return [failure for failure in found if failure is not None]

    def end(self, signal: int) -> None:
        """End all processes of the job on this host, and remove its files.

        Args:
            signal: Number of the signal that ends the job; 0 for none.
        """
        seconds = _ORDERED_SECONDS if signal == ORDERED else _END_SECONDS
        if is_saving(signal):
            seconds = _SAVE_SECONDS
        running = [p.pid for r, p in self._processes.items() if r not in self._ended]
        processes.end(self._job, running, seconds=seconds, wait=self._pass_on_for)
        for process in self._processes.values():
            if process.returncode is None:
                process.wait()
        saved = [failure.is_saved for failure in self.find_failures()]
        self.have_saved = len(saved) == len(self._processes) and all(saved)
        try:
            self._output.close()
        finally:  # whoever reads the output may have been killed
            shutil.rmtree(self._folder, ignore_errors=True)

    def _pass_on_for(self, seconds: float) -> None:
        """Pass on output for so long, also where nobody reads the screen any more."""
        with contextlib.suppress(OSError):
            self._output.pass_on_for(seconds)

    def _collect_ends(self) -> None:
        for rank, process in self._processes.items():
            if rank in self._ended:
                continue
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                self._ended[rank] = time.time(), used.ru_maxrss

    def _path(self, rank: int, name: str) -> Path:
        return self._folder / f"{rank}.{name}"


def dry_run_text(command: Command, hosts: Mapping[str, int]) -> str:
    """Say what a launcher would start.

    Args:
        command: The command that every rank would run.
        hosts: Ranks of each host, by name; empty if they are known only at the start.
    """
    python = {"script": "python ", "module": "python -m ", "program": ""}
    lines = [f"command    {python[command.kind]}{shlex.join(command.words)}"]
    if not hosts:
        lines.append("ranks      known when the hosts have met")
    for slot in assign_ranks(list(hosts.items())):
        device = f"GPU {slot.local_rank} if its host has GPUs, else CPU"
        if is_here(slot.hostname):
            count = num_gpus()
            device = f"GPU {slot.local_rank % count}" if count else "CPU"
        lines.append(f"rank {slot.rank:<6}{slot.hostname}, {device}")
        variables = {**command.environment, **slot_variables(slot)}
        lines.append(" " * 11 + " ".join(f"{n}={v}" for n, v in variables.items()))
    lines.append("Nothing was started.")
    return "\n".join(lines)


def _environment_of(command: Command, slot: Any) -> dict[str, str]:
    """Return the environment of a rank, but for what is known only at the start."""
    quiet = {rank_process.QUIET: "1"} if command.log_dir is None else {}
    threads = max(1, len(os.sched_getaffinity(0)) // slot.local_size)
    return {
        **dict.fromkeys(_THREADS, str(threads)),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **command.environment,
        **slot_variables(slot),
        **quiet,
    }
