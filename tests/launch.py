"""Start a command as a user does, on one process or under the launcher."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]

# For a process in another folder: this package, and what `startup/` does.
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'startup'}"

_HOROVOD = {
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


def launch(
    command: list[str],
    *,
    ranks: int | None,
    timeout: float,
    env: dict[str, str] | None = None,
    launcher: str = "keras-dist",
) -> subprocess.CompletedProcess[str]:
    """Run `command` from the root of the repository until it ends.

    Args:
        command: A program and its arguments.
        ranks: How many ranks of it to start; `None` for without a launcher.
        timeout: Seconds after which the command and all it started are ended.
        env: Variables to set beside this process's.
        launcher: "keras-dist" for `keras-dist run`; or "horovodrun", which imports
            TensorFlow three times before it starts a rank.

    Returns:
        The exit code, and what was printed: each line with its rank before it, as of
        `prefix` or, under `horovodrun`, "[0]<stdout>:".

    Raises:
        TimeoutError: With what was printed so far.
    """
    if ranks is not None:
        command = _under(launcher, command, ranks)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **_HOROVOD, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the whole group can be ended
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout, stderr = _end(process)
        raise TimeoutError(
            f"{' '.join(command)} did not end within {timeout} s.\n{stdout}\n{stderr}"
        ) from None
    except BaseException:  # the test run itself was interrupted
        _end(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def prefix(rank: int) -> str:
    """What `keras-dist run` puts before each line of a rank."""
    return f"[{rank}] " if rank else ""


def _under(launcher: str, command: list[str], ranks: int) -> list[str]:
    if launcher == "horovodrun":
        horovodrun = Path(sys.executable).with_name("horovodrun")
        # Else it takes MPI where it is built, and `mpirun` refuses to run as root.
        return [str(horovodrun), "--gloo", "-np", str(ranks), *command]
    return [sys.executable, "-m", "keras_dist", "run", "-np", str(ranks), *command]


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
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
