"""Flags and environment variables of the build of Horovod."""

import os
import shlex
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_dist.tools.install.facts import Facts

HOROVOD = "0.28.1"

# Build tools, installed in a temporary folder. Horovod's setup needs the distutils of
# an older setuptools, and its CMake files need a CMake before 4. The rest is imported
# during the build.
TOOLS = (
    "setuptools<80",
    "cmake>=3.18,<4",
    "wheel",
    "packaging",
    "cloudpickle",
    "psutil",
    "pyyaml",
)

# `xla_mpi_ops.cc` does not compile with TensorFlow 2.19 and later. All of its code is
# inside an `#if` on this macro, in line 23. A value that is 0 in line 23 excludes that
# code, and changes no other file. Valid for exactly Horovod 0.28.1.
CXX_FLAG = "'-DTENSORFLOW_VERSION=(__LINE__==23?0:2018000000)'"

# Strip debug symbols: 1.6 MB instead of 51 MB.
_LINKER_FLAG = "-Wl,-s"

# Only these of the user's HOROVOD_… variables are passed to the build. Others may
# contradict ours, or each other, and cause errors of CMake.
_PASSED_PREFIX = "HOROVOD_BUILD_"


@dataclass(frozen=True)
class Choice:
    """What Horovod is built with in addition to Gloo.

    Args:
        mpi: Whether with MPI.
        nccl: Whether with NCCL.
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


def runtime_requirements(python: tuple[int, int]) -> list[str]:
    """Packages that Horovod imports at run time, for a version of Python.

    Python 3.12 and later have no distutils; setuptools has one.

    >>> [runtime_requirements((3, minor))[-1] for minor in (11, 12, 13)]
    ['packaging', 'setuptools<81', 'setuptools<81']
    """
    packages = ["cloudpickle", "psutil", "pyyaml", "packaging"]
    return [*packages, "setuptools<81"] if python >= (3, 12) else packages


def build_environment(
    environ: Mapping[str, str],
    *,
    facts: Facts,
    choice: Choice,
    tools: Path,
    nccl_home: Path,
) -> dict[str, str]:
    """Environment variables of the build.

    Args:
        environ: The user's environment variables. All are kept except `HOROVOD_…`,
            of which only `HOROVOD_BUILD_…` are; the user's compiler and linker flags
            are extended.
        facts: What this environment has.
        choice: What Horovod is built with.
        tools: Folder with the build tools.
        nccl_home: Folder with `include` and `lib` of NCCL; only used with NCCL.
    """
    env = {
        name: value
        for name, value in environ.items()
        if not name.startswith("HOROVOD_") or name.startswith(_PASSED_PREFIX)
    }
    folders = [tools / "bin"]
    linker_flags = [environ.get("LDFLAGS", ""), _LINKER_FLAG]
    if choice.nccl and facts.cuda_home and facts.nccl:
        folders.append(facts.cuda_home / "bin")
        site_packages = Path(sysconfig.get_path("platlib"))
        folder = run_path(facts.nccl.library.parent, site_packages)
        linker_flags.append(rpath_flag(folder))
        env |= _nccl_settings(facts.cuda_home, nccl_home)
    return env | {
        "CMAKE_GENERATOR": "Unix Makefiles",  # `progress` reads its percentages
        "CXXFLAGS": _joined(" ", [environ.get("CXXFLAGS", ""), CXX_FLAG]),
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if choice.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "LDFLAGS": _joined(" ", linker_flags),
        "MAKEFLAGS": environ.get("MAKEFLAGS") or f"-j{facts.cores}",
        "PATH": _joined(os.pathsep, [*map(str, folders), environ.get("PATH", "")]),
        "PYTHONPATH": _joined(os.pathsep, [str(tools), environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }


def run_path(folder: Path, site_packages: Path) -> str:
    """A folder as Horovod's library names it, so that its wheel can be moved.

    Args:
        folder: Folder of a library.
        site_packages: Where packages are installed. A folder in it is named as seen
            from Horovod's library.

    >>> run_path(Path("/e/nvidia/nccl/lib"), Path("/e"))
    '$ORIGIN/../../nvidia/nccl/lib'
    """
    if not folder.is_relative_to(site_packages):
        return str(folder)
    return f"$ORIGIN/../../{folder.relative_to(site_packages)}"


def rpath_flag(folder: str) -> str:
    """The linker flag that lets a library load another one from `folder` at run time.

    >>> rpath_flag("/opt/nccl/lib")
    '-Wl,-rpath,/opt/nccl/lib'
    """
    return shlex.quote(f"-Wl,-rpath,{folder}")


def link_nccl(facts: Facts, home: Path) -> None:
    """Make a folder in which Horovod's CMake files find NCCL.

    The wheel on PyPI has no `libnccl.so`, only `libnccl.so.2`. A symbolic link would be
    enough for the linker. But CMake would add the folder of the link, which is a
    temporary one, to the library's run path; later any user of the machine could put
    another `libnccl.so` there. So the link is a linker script instead, with the name of
    a static library, for which CMake adds no run path.

    Args:
        facts: What this environment has.
        home: The folder to make.
    """
    if facts.nccl is None:
        return
    (home / "include").mkdir(parents=True)
    (home / "lib").mkdir()
    for header in facts.nccl.include.glob("nccl*"):
        (home / "include" / header.name).symlink_to(header)
    script = f'INPUT("{facts.nccl.library}")\n'
    (home / "lib" / "libnccl.a").write_text(script)


def _nccl_settings(cuda_home: Path, nccl_home: Path) -> dict[str, str]:
    return {
        "HOROVOD_CUDA_HOME": str(cuda_home),
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": str(nccl_home),
        "HOROVOD_NCCL_INCLUDE": str(nccl_home / "include"),
        "HOROVOD_NCCL_LIB": str(nccl_home / "lib"),
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def _joined(separator: str, pieces: list[str]) -> str:
    return separator.join(part for part in pieces if part)
