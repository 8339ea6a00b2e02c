"""What is missing for a build, all of it in one message, and what gets it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from keras_dist.install.facts import Facts

# Horovod 0.28.1 was built and run with each TensorFlow of this range.
FIRST_TENSORFLOW = (2, 18)
LAST_TENSORFLOW = (2, 21)

# From TensorFlow 2.21 on, its library lacks the function with which Horovod's GPU code
# finds the stream of a device (`AsGpuStreamValue`): it is built, but cannot be loaded.
LAST_TENSORFLOW_WITH_NCCL = (2, 20)

_PIP_TENSORFLOW = "pip install 'tensorflow>=2.18,<2.22'"


@dataclass(frozen=True)
class Missing:
    """One thing that a build needs and that is not here.

    Args:
        what: What it is, and what was found in its place.
        advice: What to do about it where no Debian package helps.
        debian: The Debian and Ubuntu packages that bring it.
    """

    what: str
    advice: str = ""
    debian: tuple[str, ...] = ()


def is_supported(version: str) -> bool:
    """Whether Horovod 0.28.1 compiles against this TensorFlow.

    >>> [is_supported(version) for version in ("2.17.1", "2.18.0", "2.21.1", "2.22.0")]
    [False, True, True, False]
    """
    return _is_between(version, FIRST_TENSORFLOW, LAST_TENSORFLOW)


def supports_nccl(version: str | None) -> bool:
    """Whether Horovod 0.28.1 can be loaded with NCCL beside this TensorFlow.

    >>> [supports_nccl(version) for version in ("2.18.0", "2.20.0", "2.21.0", None)]
    [True, True, False, False]
    """
    return _is_between(version or "", FIRST_TENSORFLOW, LAST_TENSORFLOW_WITH_NCCL)


def _is_between(version: str, first: tuple[int, int], last: tuple[int, int]) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and first <= (int(match[1]), int(match[2])) <= last


def find_missing(facts: Facts, *, mpi: bool, nccl: bool) -> list[Missing]:
    """Everything that is missing for a build with what was asked for.

    Args:
        facts: What this environment has.
        mpi: Whether MPI was asked for by name.
        nccl: Whether NCCL was asked for by name.
    """
    found = [*_missing_python(facts), *_missing_tools(facts)]
    if mpi and not facts.has_open_mpi:
        found.append(
            Missing(
                "Open MPI (mpicxx and mpirun on the PATH)",
                debian=("libopenmpi-dev", "openmpi-bin"),
            )
        )
    return [*found, *_missing_nccl(facts)] if nccl else found


def explain(missing: Sequence[Missing]) -> str:
    """The message that names all that is missing and what installs it."""
    lines = ["Horovod cannot be built here. Missing:"]
    for thing in missing:
        lines.append(f"  - {thing.what}")
        if thing.advice:
            lines.append(f"    {thing.advice}")
    packages = dict.fromkeys(name for thing in missing for name in thing.debian)
    if packages:
        lines.append("On Debian or Ubuntu:")
        lines.append(f"    apt-get install {' '.join(packages)}")
        lines.append("(as root, or after `sudo`; elsewhere the packages of like names)")
    return "\n".join(lines)


def _missing_python(facts: Facts) -> list[Missing]:
    """What is wrong with the Python packages."""
    found = []
    if facts.tensorflow is None:
        what = f"TensorFlow, 2.18 to 2.21. Received: none for Python {_python(facts)}."
        found.append(Missing(what, _PIP_TENSORFLOW))
    elif not is_supported(facts.tensorflow):
        what = f"TensorFlow, 2.18 to 2.21. Received: {facts.tensorflow}."
        found.append(Missing(what, _PIP_TENSORFLOW))
    if not facts.has_pip:
        found.append(
            Missing(
                "pip in this Python",
                "Run `python -m ensurepip`, or make a new virtual environment.",
                debian=("python3-venv",),
            )
        )
    if facts.is_managed:
        found.append(
            Missing(
                "a virtual environment: this Python belongs to the system, and pip "
                "must not install into it",
                "python3 -m venv .venv && . .venv/bin/activate",
                debian=("python3-venv",),
            )
        )
    return found


def _missing_tools(facts: Facts) -> list[Missing]:
    found = []
    if not facts.has_compiler:
        found.append(Missing("a C++ compiler (g++)", debian=("g++",)))
    if not facts.has_make:
        found.append(Missing("make", debian=("make",)))
    return found


def _missing_nccl(facts: Facts) -> list[Missing]:
    found = []
    if facts.distribution != "tensorflow":
        found.append(
            Missing(
                "for NCCL, TensorFlow with GPU support: the distribution `tensorflow`. "
                f"Received: `{facts.distribution}`.",
                f"pip uninstall -y {facts.distribution} && "
                f"pip install tensorflow=={facts.tensorflow}",
            )
        )
    if facts.tensorflow is not None and not supports_nccl(facts.tensorflow):
        found.append(
            Missing(
                "for NCCL, TensorFlow 2.18 to 2.20: a later one lacks a function that "
                f"Horovod's GPU code calls. Received: {facts.tensorflow}.",
                "pip install 'tensorflow>=2.18,<2.21'",
            )
        )
    if facts.cuda_home is None:
        found.append(
            Missing(
                "for NCCL, a CUDA toolkit with nvcc and the runtime's headers",
                "Install NVIDIA's CUDA toolkit, and set CUDA_HOME to its folder where "
                "it is not /usr/local/cuda.",
            )
        )
    if facts.nccl is None:
        found.append(
            Missing(
                "NCCL: nccl.h and libnccl.so",
                "pip install nvidia-nccl-cu12, or set NCCL_HOME to the folder that "
                "holds its include and lib.",
            )
        )
    return found


def _python(facts: Facts) -> str:
    return ".".join(str(number) for number in facts.python)
