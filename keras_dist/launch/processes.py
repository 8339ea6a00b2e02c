"""Find and end all processes of a job, and note the signals that stop it."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

import psutil

_STOPS, _SAVES = (SIGINT, SIGTERM, SIGHUP), (SIGTERM, SIGUSR1)

# Seconds to wait after SIGKILL.
_KILL_SECONDS = 5.0


def mark(job: str) -> str:
    """Name of an environment variable that all processes of a job have.

    All processes that a rank starts inherit it, even daemons, which leave the session
    of the rank. The id of the job is in the name, and not the value: so the processes
    of a job that was started inside another job have the variables of both.
    """
    return f"KERAS_DIST_JOB_{job}"


def find_folder(job: str) -> Path:
    """Return the path of the folder for files of a job, whose id nobody can guess."""
    return Path(tempfile.gettempdir()) / f"keras_dist.{job}"


def _list_members(job: str) -> list[int]:
    """Ids of the processes of a job that run now, of this user on this host."""
    found = psutil.process_iter(["environ"])
    return [each.pid for each in found if mark(job) in (each.info["environ"] or ())]


def end(
    job: str, ranks: list[int], *, seconds: float, wait: Callable[[float], object]
) -> None:
    """End all processes of a job, and wait until they have ended.

    Args:
        job: Id of the job.
        ranks: Ids of the ranks' processes, which first get SIGTERM.
        seconds: Seconds between SIGTERM and SIGKILL.
        wait: Waits for some seconds, and reads what the ranks print: one that prints as
            it saves would wait for that.
    """
    for pid in ranks:
        _signal(pid, SIGTERM)
    begin = time.monotonic()
    while set(ranks) & set(_list_members(job)) and time.monotonic() - begin < seconds:
        wait(0.05)
    _kill(job)


def _kill(job: str) -> None:
    begin = time.monotonic()
    # Repeatedly, since a process may start another one in the meantime.
    while (left := _list_members(job)) and time.monotonic() - begin < _KILL_SECONDS:
        for pid in left:
            _signal(pid, signal.SIGKILL)
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
        shutil.rmtree(find_folder(job), ignore_errors=True)
    finally:
        os._exit(0)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def note_signals(*others: signal.Signals) -> list[int]:
    """Return a list to which signals that stop a job are appended from now on.

    They are Ctrl-C, SIGTERM, SIGHUP and others; they do not end this process.
    """
    stopped: list[int] = []
    for number in (*_STOPS, *others):
        signal.signal(number, lambda number, frame: stopped.append(number))
    return stopped


def is_saving(number: int) -> bool:
    """Return whether a signal gives the ranks time to save."""
    return number in _SAVES
