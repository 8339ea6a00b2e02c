"""What this environment has to build Horovod with, what is missing, what to choose."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_dist.launch.systems import DEBIAN, System, translated
from keras_dist.version import (
    FIRST_TENSORFLOW,
    LAST_TENSORFLOW,
    TENSORFLOW,
    TENSORFLOW_RANGE,
    installed_tensorflow,
    parsed,
)

# The wheels of nvcc, all of one version: nvcc's own wheel takes any of the others.
CUDA = "cuda-toolkit[cccl,nvcc]==13.0.*"

# Folders that are searched after those in the user's environment variables.
_SYSTEM_HOMES = (Path("/usr"), Path("/usr/local/cuda"))


@dataclass(frozen=True)
class Nccl:
    """An installed NCCL.

    Args:
        include: Folder of `nccl.h`.
        library: The shared library: `libnccl.so`, or `libnccl.so.2` from PyPI.
    """

    include: Path
    library: Path


@dataclass(frozen=True)
class Facts:
    """Everything in this environment that determines how Horovod can be built.

    Args:
        tensorflow: Version of the installed TensorFlow; `None` if there is none.
        distribution: Name of the distribution, one of `version.TENSORFLOWS`.
        python: Major and minor version of this Python.
        has_pip: Whether this Python has pip.
        has_compiler: Whether there is a C++ compiler.
        cxx: The command that `CXX` names; empty if it is not set.
        has_make: Whether there is make.
        is_managed: Whether pip refuses to install into this Python (PEP 668).
        has_open_mpi: Whether there is Open MPI, with its compiler wrapper.
        cuda_home: Folder of a CUDA toolkit with nvcc; `None` if there is none.
        nccl: The installed NCCL; `None` if there is none.
        cores: Number of cores that the build may use.
        platform: Tag of system and processor in the names of wheels.
        glibc: Version of the C library; `(0, 0)` if it is not glibc.
    """

    tensorflow: str | None
    distribution: str = "tensorflow"
    python: tuple[int, int] = (3, 12)
    has_pip: bool = True
    has_compiler: bool = True
    cxx: str = ""
    has_make: bool = True
    is_managed: bool = False
    has_open_mpi: bool = False
    cuda_home: Path | None = None
    nccl: Nccl | None = None
    cores: int = 1
    platform: str = "linux_x86_64"
    glibc: tuple[int, int] = (2, 36)


def detect(environ: Mapping[str, str] | None = None) -> Facts:
    """Examine this environment, without importing TensorFlow.

    Args:
        environ: Environment variables; by default those of this process.
    """
    environ = os.environ if environ is None else environ
    distribution, version = installed_tensorflow()
    return Facts(
        tensorflow=version,
        distribution=distribution,
        python=sys.version_info[:2],
        has_pip=importlib.util.find_spec("pip") is not None,
        has_compiler=any(_is_on_path(name, environ) for name in compilers(environ)),
        cxx=" ".join(environ.get("CXX", "").split()[:1]),
        has_make=_is_on_path("make", environ),
        is_managed=_is_managed(environ),
        has_open_mpi=_has_open_mpi(environ),
        cuda_home=find_cuda(cuda_homes(environ, _site_packages())),
        nccl=find_nccl(nccl_homes(environ, _site_packages())),
        cores=len(os.sched_getaffinity(0)),
        platform=re.sub(r"[-.]", "_", sysconfig.get_platform()),
        glibc=_glibc(),
    )


def minor_of(version: str | None) -> str:
    """Return a version without its patch release.

    Patch releases of TensorFlow take the same Horovod.

    >>> [minor_of(version) for version in ("2.21.0", "2.21.1rc2", None)]
    ['2.21', '2.21', 'none']
    """
    return ".".join((version or "none").split(".")[:2])


def compilers(environ: Mapping[str, str]) -> list[str]:
    """Return the commands that CMake tries as C++ compiler: `CXX`, or the usual ones.

    >>> compilers({"CXX": "ccache clang++"})
    ['ccache']
    """
    chosen = environ.get("CXX", "").split()
    return chosen[:1] or ["c++", "g++", "clang++"]


def nccl_homes(environ: Mapping[str, str], site_packages: Iterable[Path]) -> list[Path]:
    """Return folders that may have NCCL; first the ones that variables name."""
    chosen = _named(environ, ("HOROVOD_NCCL_HOME", "NCCL_HOME"))
    wheels = [folder / "nvidia" / "nccl" for folder in site_packages]
    return [*chosen, *_SYSTEM_HOMES, *wheels]


def find_nccl(homes: Iterable[Path]) -> Nccl | None:
    """Find NCCL in the first of these folders that has its header and its library."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for home in homes:
        if not (home / "include" / "nccl.h").is_file():
            continue
        for folder in ("lib", "lib64", f"lib/{multiarch}"):
            for name in ("libnccl.so", "libnccl.so.2"):
                library = home / folder / name
                if library.is_file():
                    return Nccl(include=home / "include", library=library)
    return None


def cuda_homes(environ: Mapping[str, str], site_packages: Iterable[Path]) -> list[Path]:
    """Return folders that may have CUDA; first the ones that variables name."""
    chosen = _named(environ, ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"))
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    on_path = [Path(nvcc).resolve().parent.parent] if nvcc else []
    wheels = [folder / "nvidia" / "cu13" for folder in site_packages]
    return [*chosen, *on_path, *_SYSTEM_HOMES, *wheels]


def find_cuda(homes: Iterable[Path]) -> Path | None:
    """Find the first of these folders with nvcc and the headers of the CUDA runtime.

    A folder with nvcc alone may have only a wrapper script or a part of the toolkit. An
    example is the wheel `nvidia-cuda-nvcc-cu12`, which only has the assembler.
    """
    for home in homes:
        nvcc = home / "bin" / "nvcc"
        has_headers = (home / "include" / "cuda_runtime.h").is_file()
        if has_headers and "release" in _output_of(str(nvcc), "--version"):
            return home
    return None


def _has_open_mpi(environ: Mapping[str, str]) -> bool:
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    if mpirun is None or not _is_on_path("mpicxx", environ):
        return False
    return "Open MPI" in _output_of(mpirun, "--version")


def _glibc() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.libc_ver()[1])
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _is_managed(environ: Mapping[str, str]) -> bool:
    """Tell whether the system manages this Python, so that pip refuses (PEP 668)."""
    if sys.prefix != sys.base_prefix or "PIP_BREAK_SYSTEM_PACKAGES" in environ:
        return False
    return Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").is_file()


def _site_packages() -> list[Path]:
    paths = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return [Path(path) for path in dict.fromkeys(paths)]


def _named(environ: Mapping[str, str], variables: Iterable[str]) -> list[Path]:
    return [Path(environ[name]) for name in variables if environ.get(name)]


def _is_on_path(command: str, environ: Mapping[str, str]) -> bool:
    return shutil.which(command, path=environ.get("PATH")) is not None


def _output_of(*command: str) -> str:
    """Return the output of a command; empty if it cannot be run."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout


@dataclass(frozen=True)
class Choice:
    """Transports with which Horovod is built in addition to Gloo.

    Args:
        mpi: Whether to build with MPI.
        nccl: Whether to build with NCCL.
    """

    mpi: bool = False
    nccl: bool = False


def choose(facts: Facts, *, mpi: bool | None, nccl: bool | None) -> Choice:
    """Choose MPI and NCCL as the user requests, and by default if they are possible.

    Args:
        facts: What this environment has.
        mpi: Whether to build with MPI; `None`: if Open MPI is found.
        nccl: Whether to build with NCCL; `None`: if it can be built.
    """
    has_nccl = (
        facts.cuda_home is not None
        and facts.nccl is not None
        and facts.distribution == "tensorflow"
    )
    return Choice(
        mpi=facts.has_open_mpi if mpi is None else mpi,
        nccl=has_nccl if nccl is None else nccl,
    )


@dataclass(frozen=True)
class Missing:
    """One missing requirement of a build.

    Args:
        what: What is missing, and what was found instead.
        advice: What to do if no Debian package has it.
        debian: The Debian and Ubuntu packages that have it.
    """

    what: str
    advice: str = ""
    debian: tuple[str, ...] = ()


def is_supported(version: str) -> bool:
    """Tell whether Horovod 0.28.1 was tried with this version of TensorFlow.

    >>> [is_supported(version) for version in ("2.17.1", "2.18.0", "2.21.1", "2.22.0")]
    [False, True, True, False]
    """
    return FIRST_TENSORFLOW <= parsed(version) <= LAST_TENSORFLOW


def find_missing(facts: Facts, *, mpi: bool, nccl: bool) -> list[Missing]:
    """List everything that is missing for a build.

    Args:
        facts: What this environment has.
        mpi: Whether the user requests MPI.
        nccl: Whether the user requests NCCL.
    """
    missing = missing_python(facts)
    if not facts.has_compiler and facts.cxx:
        what = f"the C++ compiler that CXX names: {facts.cxx} is not on the PATH"
        missing.append(Missing(what, "Correct CXX, or unset it to use g++."))
    elif not facts.has_compiler:
        missing.append(Missing("a C++ compiler (g++)", debian=("g++",)))
    if not facts.has_make:
        missing.append(Missing("make", debian=("make",)))
    if mpi and not facts.has_open_mpi:
        missing.append(
            Missing(
                "Open MPI (mpicxx and mpirun on the PATH)",
                debian=("libopenmpi-dev", "openmpi-bin"),
            )
        )
    return [*missing, *_missing_nccl(facts)] if nccl else missing


def explain(missing: Sequence[Missing], system: System = DEBIAN) -> str:
    """Write the message about everything that is missing, and how to install it.

    Args:
        missing: What is missing.
        system: Whose packages are named.
    """
    lines = ["Horovod cannot be built here. Missing:"]
    for item in missing:
        lines.append(f"  - {item.what}")
        if item.advice:
            lines.append(f"    {item.advice}")
    packages = dict.fromkeys(name for item in missing for name in item.debian)
    if packages:
        command = translated(f"apt-get install {' '.join(packages)}", system)
        lines += [f"On {system.title}:", f"    {command}", f"({system.note})"]
    return "\n".join(lines)


def missing_python(facts: Facts) -> list[Missing]:
    """List Python packages that are missing, or have the wrong version.

    Args:
        facts: What this environment has.
    """
    missing = []
    if parsed(facts.tensorflow or "") < FIRST_TENSORFLOW:
        python = ".".join(map(str, facts.python))
        found = facts.tensorflow or f"none for Python {python}"
        what = f"TensorFlow, {TENSORFLOW_RANGE}. Received: {found}."
        wanted = TENSORFLOW.replace("tensorflow", facts.distribution)
        missing.append(Missing(what, f"pip install '{wanted}'"))
    if not facts.has_pip:
        missing.append(
            Missing(
                "pip in this Python",
                "Run `uv pip install pip` if uv made the environment, else "
                "`python -m ensurepip`.",
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
                f"pip install '{CUDA}', or install NVIDIA's CUDA toolkit, and set "
                "CUDA_HOME to its folder if it is not /usr/local/cuda.",
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
