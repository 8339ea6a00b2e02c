"""What this environment has to build Horovod with: compilers, MPI, CUDA, NCCL."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

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
        distribution: Name of the distribution: `tensorflow` or `tensorflow-cpu`.
        python: Major and minor version of this Python.
        has_pip: Whether this Python has pip.
        has_compiler: Whether there is a C++ compiler.
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
        has_make=_is_on_path("make", environ),
        is_managed=_is_managed(environ),
        has_open_mpi=_has_open_mpi(environ),
        cuda_home=find_cuda(cuda_homes(environ, _site_packages())),
        nccl=find_nccl(nccl_homes(environ, _site_packages())),
        cores=len(os.sched_getaffinity(0)),
        platform=re.sub(r"[-.]", "_", sysconfig.get_platform()),
        glibc=_glibc(),
    )


def installed_tensorflow() -> tuple[str, str | None]:
    """Name and version of the distribution that TensorFlow is installed from."""
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "tensorflow", None


def compilers(environ: Mapping[str, str]) -> list[str]:
    """Commands that CMake tries as C++ compiler: that in `CXX`, or the usual ones.

    >>> compilers({"CXX": "ccache clang++"})
    ['ccache']
    """
    chosen = environ.get("CXX", "").split()
    return chosen[:1] or ["c++", "g++", "clang++"]


def nccl_homes(environ: Mapping[str, str], site_packages: Iterable[Path]) -> list[Path]:
    """Folders that may have NCCL's `include` and `lib`; first those in variables."""
    chosen = _named(environ, ("HOROVOD_NCCL_HOME", "NCCL_HOME"))
    wheels = [folder / "nvidia" / "nccl" for folder in site_packages]
    return [*chosen, *_SYSTEM_HOMES, *wheels]


def find_nccl(homes: Iterable[Path]) -> Nccl | None:
    """NCCL in the first of these folders that has its header and shared library."""
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
    """Folders that may have a CUDA toolkit; first those in variables."""
    chosen = _named(environ, ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"))
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    on_path = [Path(nvcc).resolve().parent.parent] if nvcc else []
    wheels = [folder / "nvidia" / "cu13" for folder in site_packages]
    return [*chosen, *on_path, *_SYSTEM_HOMES, *wheels]


def find_cuda(homes: Iterable[Path]) -> Path | None:
    """The first of these folders with nvcc and the headers of the CUDA runtime.

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
    """Whether pip may not install here, because the system manages it (PEP 668)."""
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
    """Output of a command; empty if it cannot be run."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout
