"""Start processes so that every one of them, and all that they start, can be ended."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

# Seconds that ranks have to end by themselves, and to be gone when they are killed.
_TERM_SECONDS = 2.0
_KILL_SECONDS = 5.0


def mark(job: str) -> str:
    """Name of a variable that all processes of a job have in their environment.

    Whatever a rank starts inherits it, also what leaves its session, as daemons do.
    The number is in the name: a job within a job has the marks of both.
    """
    return f"KERAS_DIST_JOB_{job}"


def members(job: str) -> list[int]:
    """The processes of a job that are there now, of this user and this host."""
    sign = f"{mark(job)}=".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # of another user, or it has just ended
            continue
        if any(variable.startswith(sign) for variable in variables):
            found.append(int(folder.name))
    return found


def end(
    job: str,
    ranks: list[int],
    *,
    is_urgent: bool = False,
    seconds: float = _TERM_SECONDS,
) -> None:
    """End all processes of a job; when this returns, they are gone.

    Args:
        job: Its number.
        ranks: Processes of the ranks, which are asked first.
        is_urgent: Whether to kill at once.
        seconds: That ranks have to end when they are asked.
    """
    if not is_urgent:
        for pid in ranks:
            _signal(pid, signal.SIGTERM)
        begin = time.monotonic()
        while set(ranks) & set(members(job)):
            if time.monotonic() - begin > seconds:
                break
            time.sleep(0.05)
    begin = time.monotonic()
    # Again and again: a process may start another one while we look.
    while (left := members(job)) and time.monotonic() - begin < _KILL_SECONDS:
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.02)


@contextlib.contextmanager
def reaper(job: str) -> Iterator[None]:
    """Inside the block, the processes of a job end even if this one is killed.

    A process of its own waits until this one is no more, however it ends, and then ends
    what is left. Call it before the first thread is started.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _keep_watch(job, reader)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(pid, 0)


def _keep_watch(job: str, reader: int) -> None:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(reader, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        # Nobody must wait for what this process holds open, its own pipe above all.
        os.closerange(3, 1 << 16)
        os.read(0, 1)
        end(job, [], is_urgent=True)
    finally:
        os._exit(0)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
