"""Run the commands of an installation: their log, and their errors."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# -P: do not import from the current folder, in which a file may hide a package.
PYTHON = (sys.executable, "-P")
PIP = (*PYTHON, "-m", "pip", "--disable-pip-version-check")

_LAST_LINES = 20

_ERROR = re.compile(r"\berror: |CMake Error")

# Patterns of the output of a failed build, and their remedies; the first match counts.
# A line of CMake that begins with "-- " is no error: CMake continues without the
# library.
_REMEDIES = {
    r"No space left on device": (
        "The disk is full. Free some space, or set TMPDIR to a folder that has 2 GB."
    ),
    r"Killed|[Cc]annot allocate memory|virtual memory exhausted": (
        "The memory is full. Compile one file at a time: set MAKEFLAGS=-j1."
    ),
    r"Python\.h: No such file": (
        "The headers of Python are missing: apt-get install python3-dev"
    ),
    r"mpi\.h: No such file|(?<!-- )Could NOT find MPI": (
        "Open MPI cannot be used: apt-get install libopenmpi-dev openmpi-bin, or pass "
        "--no-mpi."
    ),
    r"nccl\.h: No such file|(?<!-- )Could NOT find NCCL": (
        "NCCL cannot be used: pip install nvidia-nccl-cu12, or pass --no-nccl."
    ),
    r"unsupported GNU version|No CMAKE_CUDA_COMPILER|Cannot find `nvcc`"
    r"|(?<!-- )Could NOT find CUDAToolkit": (
        "The CUDA toolkit cannot be used, or not with this g++. Install another, set "
        "CUDA_HOME to its folder, or pass --no-nccl."
    ),
    r"No CMAKE_C(XX)?_COMPILER could be found|not able to compile a simple test": (
        "The C++ compiler cannot be used: apt-get install g++"
    ),
    r"fatal error: (bits/|c?std|features\.h|string|vector)\S*: No such file": (
        "The headers of C++ are missing: apt-get install build-essential"
    ),
    r"Temporary failure in name resolution|Max retries exceeded"
    r"|Failed to establish a new connection|No matching distribution found": (
        "pip could not fetch a package. Check the network, and pip's settings with "
        "`pip config list`."
    ),
}


class InstallError(RuntimeError):
    """Horovod was not installed; the message says why and what to do."""


class Steps:
    """Run commands, and write their output to one log, whose path is `log`."""

    def __init__(self) -> None:
        with tempfile.NamedTemporaryFile(
            prefix="horovod-build-", suffix=".log", delete=False
        ) as file:
            self.log = Path(file.name)

    def run(
        self, what: str, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        """Run a command, print what it does, and raise an `InstallError` if it fails.

        Args:
            what: What the command does, for the user.
            command: The command and its arguments.
            env: Its environment; by default that of this process.
        """
        begin = self.log.stat().st_size
        if not self.try_to_run(what, command, env=env):
            output = self.log.read_bytes()[begin:].decode(errors="replace")
            output = output.partition("\n")[2]  # without the command
            raise InstallError(describe_failure(what, output, self.log))

    def try_to_run(
        self, what: str, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> bool:
        """Run a command that may fail, and return whether it succeeded."""
        print(f"{what} ...", flush=True)
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            done = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
            log.write(f"exit code {done.returncode}\n")
        return done.returncode == 0


def remedy_for(output: str) -> str:
    """Return the remedy for the output of a known failure; empty for any other.

    >>> remedy_for("fatal error: mpi.h: No such file or directory")[:25]
    'Open MPI cannot be used: '
    """
    found = (text for key, text in _REMEDIES.items() if re.search(key, output))
    return next(found, "")


def describe_failure(what: str, output: str, log: Path) -> str:
    """Write the message about a failed command: its last lines, its log, a remedy.

    If several files are compiled at once, the others continue after an error, and print
    more lines. So the first error is put in front if it is not in the last lines.
    """
    lines = output.splitlines()
    shown = lines[-_LAST_LINES:]
    first = next((line for line in lines if _ERROR.search(line)), None)
    if first is not None and first not in shown:
        shown = [first, "...", *shown]
    told = [
        f"{what} failed. The last lines of its output:",
        *(f"    {line.rstrip()}" for line in shown),
        f"The whole output is in {log}",
        remedy_for(output),
    ]
    return "\n".join(line for line in told if line.strip())
