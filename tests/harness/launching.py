"""Start a command as a user does, on one process or under the launcher."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]

# For a process in another folder: this package, and what `startup/` does.
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'startup'}"

# A training of which one rank misbehaves, as the variable of this name says.
MISBEHAVES = ROOT / "tests" / "launch" / "misbehaves.py"

RUN = [sys.executable, "-m", "keras_dist", "run"]
# Without the option it takes MPI if it has that, and `mpirun` refuses to run as root.
HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "--gloo"]

HOROVOD = {
    # A rank that waits for another one fails after a minute.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    # Several ranks share a core here; those that have no tensor leave it to others.
    "KERAS_DIST_LONGEST_CYCLE_MS": "200",
    # A process that does not end says where it is, when it is asked by SIGABRT.
    "PYTHONFAULTHANDLER": "1",
}


def free_port() -> int:
    """Return a port at which nobody listens, and that no connection takes by itself."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("100 ports are in use.")


def write_script(folder: Path, text: str, name: str = "script.py") -> str:
    """Write a script into a folder; return its path."""
    (folder / name).write_text(text)
    return str(folder / name)


def start(
    command: Sequence[object], *, env: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start a command from the root of the repository.

    Args:
        command: A program, or a script of Python, and its arguments.
        env: Variables to set beside this process's.
        **options: Of `Popen`; by default both outputs can be read, as text.
    """
    words = [str(word) for word in command]
    words = [sys.executable, *words] if words[0].endswith(".py") else words
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = {"cwd": ROOT, **pipes, **options}
    return subprocess.Popen(words, env={**os.environ, **(env or {})}, **options)


def finish(
    process: subprocess.Popen[str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command that has a session of its own.

    Raises:
        TimeoutError: With what was printed so far; all that it started has ended.
    """
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout, stderr = end(process)
        raise TimeoutError(
            f"{process.args} did not end within {timeout} s.\n{stdout}\n{stderr}"
        ) from None
    except BaseException:  # the test run itself was interrupted
        end(process)
        raise
    code = process.returncode
    return subprocess.CompletedProcess(process.args, code, stdout, stderr)


def launch(
    command: Sequence[object],
    *,
    ranks: int | None = None,
    timeout: float = 300,
    env: dict[str, str] | None = None,
    launcher: str = "keras-dist",
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `command` from the root of the repository until it ends.

    Args:
        command: A program, or a script of Python, and its arguments.
        ranks: How many ranks of it to start; `None` for without a launcher.
        timeout: Seconds after which the command and all it started are ended.
        env: Variables to set beside this process's.
        launcher: "keras-dist" for `keras-dist run`; or "horovodrun", which imports
            TensorFlow three times before it starts a rank.
        check: Whether an exit code other than 0 is an error.

    Returns:
        The exit code, and what was printed: each line with its rank before it, as of
        `prefix` or, under `horovodrun`, "[0]<stdout>:".

    Raises:
        TimeoutError: With what was printed so far.
    """
    command = command_of(command, ranks, launcher)
    process = start(command, env={**HOROVOD, **(env or {})}, start_new_session=True)
    done = finish(process, timeout)
    ends = f"{done.stdout[-20_000:]}\n{done.stderr[-8000:]}"
    assert not (check and done.returncode), f"{done.args}: {done.returncode}\n{ends}"
    return done


def command_of(
    command: Sequence[object], ranks: int | None, launcher: str
) -> Sequence[object]:
    """Return the command by which a launcher starts ranks; see `launch`."""
    if launcher == "horovodrun":  # which starts programs, and no script by itself
        script = [sys.executable] if str(command[0]).endswith(".py") else []
        return [*HOROVODRUN, "-np", ranks, *script, *command]
    return command if ranks is None else [*RUN, "-np", ranks, *command]


def run(*words, **variables):
    """Run `keras-dist run` to its end, with variables in its environment."""
    return launch([*RUN, *words], env={"PYTHONPATH": PYTHONPATH, **variables})


def allow(seconds: float) -> float:
    """Return a limit in seconds that grows with the load of this machine."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def until(condition: Callable[[], Any], what: str, seconds: float = 10) -> None:
    """Wait until a condition is true; a `TimeoutError` after so many seconds."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"waited for {what}")
        time.sleep(0.02)


def wait_for_files(*files: Path, seconds: float = 60) -> None:
    """Wait until all these files are there."""
    until(lambda: all(file.exists() for file in files), f"{files}", seconds)


def prefix(rank: int) -> str:
    """What `keras-dist run` puts before each line of a rank."""
    return f"[{rank}] " if rank else ""


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a command that has a session of its own; return what it printed."""
    with contextlib.suppress(psutil.Error):
        for started in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "HOROVOD_RANK" in started.environ() and "python" in started.name():
                    started.send_signal(signal.SIGABRT)
    time.sleep(3)  # their output passes through the launcher
    _signal(process, signal.SIGTERM)
    try:
        # The launcher gives its ranks some seconds to end.
        return process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)  # the launcher's ranks end with it
        return process.communicate()


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.killpg(process.pid, number)
