"""What is missing for a build, in one message, with the commands that install it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from keras_dist.tools.install.facts import Facts

# Horovod 0.28.1 was built and tested with each TensorFlow of this range.
FIRST_TENSORFLOW = (2, 18)
LAST_TENSORFLOW = (2, 21)

# The command that installs Open MPI on Debian and Ubuntu.
OPEN_MPI = "apt-get install libopenmpi-dev openmpi-bin"

_PIP_TENSORFLOW = "pip install 'tensorflow>=2.18,<2.22'"


@dataclass(frozen=True)
class Missing:
    """One thing that a build needs and that is missing.

    Args:
        what: What is missing, and what was found instead.
        advice: What to do if there is no Debian package for it.
        debian: The Debian and Ubuntu packages that have it.
    """

    what: str
    advice: str = ""
    debian: tuple[str, ...] = ()


def is_supported(version: str) -> bool:
    """Whether Horovod 0.28.1 compiles with this version of TensorFlow.

    >>> [is_supported(version) for version in ("2.17.1", "2.18.0", "2.21.1", "2.22.0")]
    [False, True, True, False]
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return False
    return FIRST_TENSORFLOW <= (int(match[1]), int(match[2])) <= LAST_TENSORFLOW


def find_missing(facts: Facts, *, mpi: bool, nccl: bool) -> list[Missing]:
    """Everything that is missing for a build.

    Args:
        facts: What this environment has.
        mpi: Whether the user requests MPI.
        nccl: Whether the user requests NCCL.
    """
    missing = [*missing_python(facts), *_missing_tools(facts)]
    if mpi and not facts.has_open_mpi:
        missing.append(
            Missing(
                "Open MPI (mpicxx and mpirun on the PATH)",
                debian=("libopenmpi-dev", "openmpi-bin"),
            )
        )
    return [*missing, *_missing_nccl(facts)] if nccl else missing


def explain(missing: Sequence[Missing]) -> str:
    """The message that lists all that is missing, and how to install it."""
    lines = ["Horovod cannot be built here. Missing:"]
    for item in missing:
        lines.append(f"  - {item.what}")
        if item.advice:
            lines.append(f"    {item.advice}")
    packages = dict.fromkeys(name for item in missing for name in item.debian)
    if packages:
        lines.append("On Debian or Ubuntu:")
        lines.append(f"    apt-get install {' '.join(packages)}")
        lines.append("(as root or with `sudo`; other systems have similar packages)")
    return "\n".join(lines)


def missing_python(facts: Facts) -> list[Missing]:
    """What is missing among the Python packages, or has the wrong version.

    Args:
        facts: What this environment has.
    """
    missing = []
    if facts.tensorflow is None:
        what = f"TensorFlow, 2.18 to 2.21. Received: none for Python {_python(facts)}."
        missing.append(Missing(what, _PIP_TENSORFLOW))
    elif not is_supported(facts.tensorflow):
        what = f"TensorFlow, 2.18 to 2.21. Received: {facts.tensorflow}."
        missing.append(Missing(what, _PIP_TENSORFLOW))
    if not facts.has_pip:
        missing.append(
            Missing(
                "pip in this Python",
                "Run `python -m ensurepip`, or make a new virtual environment.",
                debian=("python3-venv",),
            )
        )
    if facts.is_managed:
        missing.append(
            Missing(
                "a virtual environment: this Python belongs to the system, and pip "
                "must not install into it",
                "python3 -m venv .venv && . .venv/bin/activate",
                debian=("python3-venv",),
            )
        )
    return missing


def _missing_tools(facts: Facts) -> list[Missing]:
    missing = []
    if not facts.has_compiler:
        missing.append(Missing("a C++ compiler (g++)", debian=("g++",)))
    if not facts.has_make:
        missing.append(Missing("make", debian=("make",)))
    return missing


def _missing_nccl(facts: Facts) -> list[Missing]:
    missing = []
    if facts.distribution != "tensorflow":
        missing.append(
            Missing(
                "for NCCL, TensorFlow with GPU support: the distribution `tensorflow`. "
                f"Received: `{facts.distribution}`.",
                f"pip uninstall -y {facts.distribution} && "
                f"pip install tensorflow=={facts.tensorflow}",
            )
        )
    if facts.cuda_home is None:
        missing.append(
            Missing(
                "for NCCL, a CUDA toolkit with nvcc and the runtime's headers",
                "Install NVIDIA's CUDA toolkit, and set CUDA_HOME to its folder if it "
                "is not /usr/local/cuda.",
            )
        )
    if facts.nccl is None:
        missing.append(
            Missing(
                "NCCL: nccl.h and libnccl.so",
                "pip install nvidia-nccl-cu12, or set NCCL_HOME to the folder with its "
                "include and lib.",
            )
        )
    return missing


def _python(facts: Facts) -> str:
    return ".".join(str(number) for number in facts.python)
