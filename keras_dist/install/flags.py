"""How Horovod is built, as plain data: what goes in, and the environment."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_dist.install.facts import Facts
from keras_dist.install.requirements import supports_nccl

HOROVOD = "0.28.1"

# Build tools in a folder of their own. Horovod's setup needs distutils as of then,
# its CMake files a CMake before 4, and the rest is imported while it is built.
TOOLS = (
    "setuptools<80",
    "cmake>=3.18,<4",
    "wheel",
    "packaging",
    "cloudpickle",
    "psutil",
    "pyyaml",
)

# `xla_mpi_ops.cc` does not compile against TensorFlow 2.19 and later. All of it
# stands under a check of this macro on its line 23, so a value that is 0 on that line
# empties that file and no other. Valid for exactly Horovod 0.28.1.
_CXX_FLAG = "'-DTENSORFLOW_VERSION=(__LINE__==23?0:2018000000)'"

# Without symbols for the debugger: 1.6 MB instead of 51 MB.
_LINKER_FLAG = "-Wl,-s"

# What the user may still say about the build; other settings of Horovod's contradict
# ours, or each other, and end in CMake errors.
_SAVED_PREFIX = "HOROVOD_BUILD_"


@dataclass(frozen=True)
class Choice:
    """What goes into Horovod besides Gloo."""

    mpi: bool = False
    nccl: bool = False


def choose(facts: Facts, *, mpi: bool | None, nccl: bool | None) -> Choice:
    """What was asked for by name, and of the rest, what can be built here.

    Args:
        facts: What this environment has.
        mpi: Whether to build with MPI; `None` for where Open MPI is found.
        nccl: Whether to build with NCCL; `None` for where it can be built.
    """
    has_nccl = (
        facts.cuda_home is not None
        and facts.nccl is not None
        and facts.distribution == "tensorflow"
        and supports_nccl(facts.tensorflow)
    )
    return Choice(
        mpi=facts.has_open_mpi if mpi is None else mpi,
        nccl=has_nccl if nccl is None else nccl,
    )


def runtime_requirements(python: tuple[int, int]) -> list[str]:
    """What Horovod imports at run time; distutils left Python with 3.12.

    >>> [runtime_requirements((3, minor))[-1] for minor in (11, 12, 13)]
    ['packaging', 'setuptools<81', 'setuptools<81']
    """
    wanted = ["cloudpickle", "psutil", "pyyaml", "packaging"]
    return [*wanted, "setuptools<81"] if python >= (3, 12) else wanted


def build_environment(
    environ: Mapping[str, str],
    *,
    facts: Facts,
    choice: Choice,
    tools: Path,
    nccl_home: Path,
) -> dict[str, str]:
    """The environment of the build.

    Args:
        environ: The user's environment. Its compiler and linker flags, `MAKEFLAGS`
            and `HOROVOD_BUILD_…` are kept; its other settings of Horovod are not.
        facts: What this environment has.
        choice: What goes into Horovod.
        tools: Folder with the build tools.
        nccl_home: Folder with `include` and `lib` of NCCL, used where it is chosen.
    """
    env = {
        name: value
        for name, value in environ.items()
        if not name.startswith("HOROVOD_") or name.startswith(_SAVED_PREFIX)
    }
    folders = [tools / "bin"]
    linker_flags = [environ.get("LDFLAGS", ""), _LINKER_FLAG]
    if choice.nccl and facts.cuda_home and facts.nccl:
        folders.append(facts.cuda_home / "bin")
        linker_flags.append(rpath_flag(facts.nccl.library.parent))
        env |= _nccl_settings(facts.cuda_home, nccl_home)
    return env | {
        "CMAKE_GENERATOR": "Unix Makefiles",  # its progress is what we read
        "CXXFLAGS": _joined(" ", [environ.get("CXXFLAGS", ""), _CXX_FLAG]),
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


def rpath_flag(folder: Path) -> str:
    """The linker flag that lets a library find another in `folder` at run time.

    >>> rpath_flag(Path("/opt/nccl/lib"))
    '-Wl,-rpath,/opt/nccl/lib'
    """
    return shlex.quote(f"-Wl,-rpath,{folder}")


def link_nccl(facts: Facts, home: Path) -> None:
    """Lay out NCCL in `home` as Horovod's CMake files look for it.

    PyPI's wheel has no `libnccl.so`, only `libnccl.so.2`. A symbolic link would do
    for the linker, but CMake would then write this temporary folder into the library
    as a place to load NCCL from, where any user of the machine could put a file later.
    So the link is a linker script, under a name that CMake takes for a static library.
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


def _joined(separator: str, parts: list[str]) -> str:
    return separator.join(part for part in parts if part)
