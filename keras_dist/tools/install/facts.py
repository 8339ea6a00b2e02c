"""What this environment has to build Horovod with, what is missing, what to choose."""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keras_dist.tools.install.steps import find_pip
from keras_dist.version import (
    FIRST_TENSORFLOW,
    TENSORFLOW,
    TENSORFLOW_RANGE,
    format_version,
    installed_tensorflow,
    parse_version,
)

HOROVOD = "0.28.1"
SOURCE_HASH = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# The wheels of nvcc, all of one version: nvcc's own wheel takes any of the others.
CUDA = "cuda-toolkit[cccl,nvcc]==13.0.*"

# Folders that are searched after those in the user's environment variables.
_SYSTEM_HOMES = (Path("/usr"), Path("/usr/local/cuda"))


class Nccl(NamedTuple):
    """An installed NCCL: the folder of `nccl.h`, and the shared library."""

    include: Path
    library: Path


@dataclass(frozen=True)
class Facts:
    """Everything in this environment that determines how Horovod can be built.

    Args:
        tensorflow: Version of the installed TensorFlow; `None` if there is none.
        distribution: Name of the distribution, one of `version.TENSORFLOWS`.
        has_pip: Whether this Python has pip, or ensurepip's.
        has_compiler: Whether there is a C++ compiler.
        has_make: Whether there is make.
        has_open_mpi: Whether there is Open MPI, with its compiler wrapper.
        cuda_home: Folder of a CUDA toolkit with nvcc; `None` if there is none.
        nccl: The installed NCCL; `None` if there is none.
    """

    tensorflow: str | None
    distribution: str = "tensorflow"
    has_pip: bool = True
    has_compiler: bool = True
    has_make: bool = True
    has_open_mpi: bool = False
    cuda_home: Path | None = None
    nccl: Nccl | None = None


class Choice(NamedTuple):
    """Transports with which Horovod is built in addition to Gloo."""

    mpi: bool = False
    nccl: bool = False


def detect() -> Facts:
    """Examine this environment, without importing TensorFlow."""
    distribution, version = installed_tensorflow()
    # What CMake tries: `CXX`, or the usual names.
    compilers = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    mpirun = shutil.which("mpirun") and shutil.which("mpicxx")
    return Facts(
        tensorflow=version,
        distribution=distribution,
        has_pip=find_pip() is not None,
        has_compiler=any(map(shutil.which, compilers)),
        has_make=shutil.which("make") is not None,
        has_open_mpi=bool(mpirun) and "Open MPI" in _read_output("mpirun", "--version"),
        cuda_home=find_cuda(),
        nccl=find_nccl(),
    )


def find_nccl() -> Nccl | None:
    """Find NCCL's header and library: where the user says, in the system, in wheels."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    homes = _homes("HOROVOD_NCCL_HOME", "NCCL_HOME")
    for home in [*homes, *_SYSTEM_HOMES, _wheels() / "nccl"]:
        for folder in ("lib", "lib64", f"lib/{multiarch}"):
            for name in ("libnccl.so", "libnccl.so.2"):
                library = home / folder / name
                if library.is_file() and (home / "include" / "nccl.h").is_file():
                    return Nccl(include=home / "include", library=library)
    return None


def find_cuda() -> Path | None:
    """Find a CUDA toolkit: where the user says, on the PATH, in the system, in wheels.

    A folder with nvcc alone may have only a wrapper script or a part of the toolkit. An
    example is the wheel `nvidia-cuda-nvcc-cu12`, which only has the assembler.
    """
    homes = _homes("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
    nvcc = shutil.which("nvcc")
    on_path = [Path(nvcc).resolve().parent.parent] if nvcc else []
    for home in [*homes, *on_path, *_SYSTEM_HOMES, _wheels() / "cu13"]:
        has_headers = (home / "include" / "cuda_runtime.h").is_file()
        nvcc = str(home / "bin" / "nvcc")
        if has_headers and "release" in _read_output(nvcc, "--version"):
            return home
    return None


def _wheels() -> Path:
    return Path(sysconfig.get_path("purelib"), "nvidia")


def _homes(*variables: str) -> list[Path]:
    return [Path(os.environ[name]) for name in variables if os.environ.get(name)]


def _read_output(*command: str) -> str:
    """Return the output of a command; empty if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return done.stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def choose(
    facts: Facts, *, mpi: bool | None, nccl: bool | None, is_build: bool = True
) -> Choice:
    """Choose MPI and NCCL as the user requests, and by default if they are possible.

    NCCL needs nvcc if Horovod is built (`is_build`), and not if a wheel is taken.
    """
    has_nccl = facts.nccl is not None and facts.distribution == "tensorflow"
    has_nccl = has_nccl and (facts.cuda_home is not None or not is_build)
    return Choice(
        mpi=facts.has_open_mpi if mpi is None else mpi,
        nccl=has_nccl if nccl is None else nccl,
    )


def find_missing(facts: Facts, *, mpi: bool, nccl: bool) -> list[str]:
    """List what is missing for a build, with MPI and NCCL if requested, and the cure.

    Packages are named as in Debian and Ubuntu; docs/how_to/install.md has others.
    """
    python = format_version(sys.version_info[:2])
    received = facts.tensorflow or f"none for Python {python}"
    name = facts.distribution
    needs = [
        (
            parse_version(facts.tensorflow or "") >= FIRST_TENSORFLOW,
            f"TensorFlow, {TENSORFLOW_RANGE}. Received: {received}. Run: pip install "
            f"'{TENSORFLOW.replace('tensorflow', name)}'",
        ),
        (facts.has_pip, "pip: apt-get install python3-venv"),
        (facts.has_compiler, "a C++ compiler, CXX or g++: apt-get install g++"),
        (facts.has_make, "make: apt-get install make"),
        (
            facts.has_open_mpi or not mpi,
            "Open MPI: apt-get install libopenmpi-dev openmpi-bin",
        ),
        (
            name == "tensorflow" or not nccl,
            f"for NCCL, the distribution `tensorflow`. Received: `{name}`. Run: pip "
            f"uninstall -y {name} && pip install tensorflow=={facts.tensorflow}",
        ),
        (
            facts.cuda_home or not nccl,
            f"for NCCL, nvcc and the runtime's headers: pip install '{CUDA}', or set "
            "CUDA_HOME to the folder of another toolkit",
        ),
        (
            facts.nccl or not nccl,
            "NCCL, nccl.h and libnccl.so: pip install nvidia-nccl-cu12, or set "
            "NCCL_HOME to its folder",
        ),
    ]
    return [need for is_met, need in needs if not is_met]
