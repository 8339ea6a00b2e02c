"""Run the commands of an installation: their log, their progress, and their errors."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from keras_dist.launch.systems import here

# -P: do not import from the current folder, in which a file may hide a package.
PYTHON = (sys.executable, "-P")
PIP = (*PYTHON, "-m", "pip", "--disable-pip-version-check")

# Percent between two printed lines if the output is not a terminal.
_STEP = 10

_PERCENT = re.compile(r"\s*\[\s*(\d{1,3})%\]")

_LAST_LINES = 20

_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(r"\berror: |CMake Error")

# Patterns of the output of a failed build, and their remedies; the first match counts.
# A line of CMake that begins with "-- " is no error: CMake continues without the
# library.
_REMEDIES = (
    (
        r"No space left on device",
        "The disk is full. Free some space, or set TMPDIR to a folder that has 2 GB.",
    ),
    (
        r"Killed|[Cc]annot allocate memory|virtual memory exhausted",
        "The memory is full. Compile one file at a time: set MAKEFLAGS=-j1.",
    ),
    (
        r"Python\.h: No such file",
        "The headers of Python are missing: apt-get install python3-dev",
    ),
    (
        r"mpi\.h: No such file|(?<!-- )Could NOT find MPI",
        "Open MPI cannot be used: apt-get install libopenmpi-dev openmpi-bin, or pass "
        "--no-mpi.",
    ),
    (
        r"nccl\.h: No such file|(?<!-- )Could NOT find NCCL",
        "NCCL cannot be used: pip install nvidia-nccl-cu12, or pass --no-nccl.",
    ),
    (
        r"unsupported GNU version|No CMAKE_CUDA_COMPILER|Cannot find `nvcc`"
        r"|(?<!-- )Could NOT find CUDAToolkit",
        "The CUDA toolkit cannot be used, or not with this g++. Install another, set "
        "CUDA_HOME to its folder, or pass --no-nccl.",
    ),
    (
        r"No CMAKE_C(XX)?_COMPILER could be found|not able to compile a simple test",
        "The C++ compiler cannot be used: apt-get install g++",
    ),
    (
        r"fatal error: (bits/|c?std|features\.h|string|vector)\S*: No such file",
        "The headers of C++ are missing: apt-get install build-essential",
    ),
    (
        r"externally-managed-environment",
        "This Python belongs to the system. Make a virtual environment: "
        "apt-get install python3-venv && python3 -m venv .venv",
    ),
    (
        r"Temporary failure in name resolution|Max retries exceeded"
        r"|Failed to establish a new connection|No matching distribution found",
        "pip could not fetch a package. Check the network, and pip's settings with "
        "`pip config list`.",
    ),
)


class InstallError(RuntimeError):
    """Horovod was not installed; the message says why and what to do.

    Args:
        text: The message, with Debian's packages; it names those of this system.
    """

    def __init__(self, text: str) -> None:
        super().__init__(here(text))


class Steps:
    """Run commands, and write their output to one log.

    Args:
        log_file: The log.
        log: Path of the log.
        screen: A `Screen`, for the progress of the build.
    """

    def __init__(self, log_file: TextIO, log: Path, screen: Any) -> None:
        self._log_file = log_file
        self.log = log
        self._screen = screen

    def run(
        self,
        what: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        has_percent: bool = False,
    ) -> None:
        """Run a command, and print what it does.

        Args:
            what: What the command does, for the user.
            command: The command and its arguments.
            env: Its environment; by default that of this process.
            has_percent: Whether its output has percentages to show.

        Raises:
            InstallError: If the exit code is not 0.
        """
        if has_percent:
            progress = Progress(what, self._screen)
            code, output = self._execute(command, env, progress.read)
            progress.finish()
        else:
            self._screen.line(f"{what} ...")
            code, output = self._execute(command, env, lambda line: None)
        if code != 0:
            raise InstallError(
                describe_failure(what, code=code, output=output, log=self.log)
            )

    def try_to_run(self, what: str, command: Sequence[str]) -> bool:
        """Run a command that may fail, and return whether it succeeded.

        Args:
            what: What the command does, for the user.
            command: The command and its arguments.
        """
        self._screen.line(f"{what} ...")
        return self._execute(command, None, lambda line: None)[0] == 0

    def _execute(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        on_line: Callable[[str], Any],
    ) -> tuple[int, list[str]]:
        """Run a command; return its exit code, and its output as lines."""
        self._log_file.write(f"$ {' '.join(command)}\n")
        output = []
        with subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self._log_file.write(line)
                self._log_file.flush()
                output.append(line)
                on_line(line)
        return process.returncode, output


class Progress:
    """Show how far a build is, by the percentages in its output.

    On a terminal one line is overwritten. Elsewhere, as in a log of a build server,
    there is a new line every 10 percent.

    Args:
        title: What is being done.
        screen: A `Screen`.
        clock: A function that returns the time in seconds.
    """

    def __init__(
        self, title: str, screen: Any, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title = title
        self._screen = screen
        self._clock = clock
        self._start = clock()
        self._percent = 0
        self._step = -1
        self._text = ""

    def read(self, line: str) -> None:
        """Read one line of the output, and show what has changed."""
        self._percent = max(self._percent, percent_of(line) or 0)
        seconds = int(self._clock() - self._start)
        text = f"{self._title}: {self._percent} %, {seconds} s"
        step = self._percent // _STEP
        if self._screen.is_terminal and text != self._text:
            self._screen.running(text)
        elif not self._screen.is_terminal and step > self._step:
            self._screen.line(text)
        self._text, self._step = text, step

    def finish(self) -> None:
        """Leave the last state on the terminal."""
        if self._screen.is_terminal and self._text:
            self._screen.line(self._text)


def percent_of(line: str) -> int | None:
    """Return the percentage in a line of the build's output; `None` if there is none.

    >>> percent_of("  [ 37%] Building CXX object gloo/types.cc.o")
    37
    """
    match = _PERCENT.match(line)
    return int(match[1]) if match else None


def remedy_for(output: str) -> str:
    """Return the remedy for a known failure; empty for any other.

    Args:
        output: Output of the command that failed.

    >>> remedy_for("fatal error: mpi.h: No such file or directory")[:25]
    'Open MPI cannot be used: '
    """
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, output):
            return remedy
    return ""


def describe_failure(what: str, *, code: int, output: Sequence[str], log: Path) -> str:
    """Write the message about a failed command: its last lines, its log, a remedy.

    Args:
        what: What the command does.
        code: Its exit code.
        output: The lines that it printed.
        log: File with the whole output.
    """
    lines = [
        f"{what} failed with exit code {code}. The last lines of its output:",
        *(f"    {line.rstrip()}" for line in relevant_lines(output)),
        f"The whole output is in {log}",
        remedy_for("".join(output)),
    ]
    return "\n".join(line for line in lines if line.strip())


def relevant_lines(output: Sequence[str]) -> list[str]:
    """Return the last lines of a failed build, without tracebacks of Python and pip.

    If several files are compiled at once, the others continue after an error, and print
    more lines. So the first error is put in front if it is not in the last lines.
    """
    stops = [n for n, line in enumerate(output) if _TRACEBACK in line]
    is_command = any("CalledProcessError" in line for line in output)
    end = stops[-1] if stops and is_command else len(output)
    tail = list(output[max(0, end - _LAST_LINES) : end])
    first = next((line for line in output[:end] if _ERROR.search(line)), None)
    return tail if first is None or first in tail else [first, "...", *tail]
