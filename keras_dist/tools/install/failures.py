"""The message about a step of the build that failed, with a remedy if it is known."""

import re
from collections.abc import Sequence
from pathlib import Path

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
    """Horovod was not installed; the message says why and what to do."""


def remedy_for(output: str) -> str:
    """The remedy for a known failure; empty for any other.

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
    """The message about a command that failed: its last lines, the log, and a remedy.

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
    """The last lines of a failed build, without the traceback of Python and pip.

    If several files are compiled at once, the others continue after an error, and print
    more lines. So the first error is put in front if it is not in the last lines.
    """
    stops = [n for n, line in enumerate(output) if _TRACEBACK in line]
    is_command = any("CalledProcessError" in line for line in output)
    end = stops[-1] if stops and is_command else len(output)
    tail = list(output[max(0, end - _LAST_LINES) : end])
    first = next((line for line in output[:end] if _ERROR.search(line)), None)
    return tail if first is None or first in tail else [first, "...", *tail]
