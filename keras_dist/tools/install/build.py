"""Build a wheel of Horovod: its source, our changes, and the flags.

Our changes to Horovod's source are files in `patches/`, each with its reason, which
`patch -p1` takes, too. They are applied here, since a host may lack that program: the
lines that a file removes, with the lines around them, have to occur in the source
exactly once.
"""

import dataclasses
import hashlib
import os
import shlex
import shutil
import sysconfig
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_dist.tools.install.facts import HOROVOD, SOURCE_HASH, Choice, Facts, Nccl
from keras_dist.tools.install.steps import PIP, Steps
from keras_dist.version import format_version, parse_version

# What Horovod imports, also during its build. Python 3.12 and later have no distutils;
# setuptools has one.
RUNTIME = (
    *("cloudpickle", "psutil", "pyyaml", "packaging"),
    "setuptools<81; python_version >= '3.12'",
)

# Build tools, installed in a temporary folder. Horovod's setup needs the distutils of
# an older setuptools, and its CMake files need a CMake before 4.
TOOLS = ("setuptools<80", "cmake>=3.18,<4", "wheel", *RUNTIME)

# `xla_mpi_ops.cc` does not compile with TensorFlow 2.19 and later. All of its code is
# inside an `#if` on this macro, in line 23. A value that is 0 in line 23 excludes that
# code, and changes no other file. Valid for exactly Horovod 0.28.1.
CXX_FLAG = "'-DTENSORFLOW_VERSION=(__LINE__==23?0:2018000000)'"

# Strip debug symbols: 1.6 MB instead of 51 MB.
_LINKER_FLAG = "-Wl,-s"

# Only these of the user's HOROVOD_… variables are passed to the build. Others may
# contradict ours, or each other, and cause errors of CMake.
_PASSED_PREFIX = "HOROVOD_BUILD_"


def build_wheel(facts: Facts, choice: Choice, folder: Path, steps: Steps) -> Path:
    """Build the wheel in a folder below `folder`, and return its path.

    Args:
        facts: What this environment has.
        choice: Transports to build with.
        folder: An empty folder.
        steps: Runs the commands.

    Raises:
        RuntimeError: If a step of the build fails.
    """
    wheels, tools = folder / "wheels", str(folder / "tools")
    steps.run("Fetching the build tools", [*PIP, "install", "--target", tools, *TOOLS])
    if choice.nccl and facts.cuda_home and facts.nccl:
        link_nccl(facts.nccl, folder / "nccl")
        toolkit = link_cuda(facts.cuda_home, folder / "cuda")
        facts = dataclasses.replace(facts, cuda_home=toolkit)
    env = build_environment(os.environ, facts, choice, folder)
    # Without isolation the build finds the installed TensorFlow. Without the cache pip
    # does not take a wheel that it has built for another TensorFlow.
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
    source = fetch_source(folder, [*PIP, "download", *options], steps, env)
    for path in patch_files():
        print(f"Patching: {apply(source, path.read_text())}")
    steps.run(
        "Building Horovod",
        [*PIP, "wheel", *options, "-v", "-w", str(wheels), str(source)],
        # Not while it is fetched: pip wants the version that it has asked for.
        env=env | {"HOROVOD_LOCAL_VERSION": local_version(facts.tensorflow, choice)},
    )
    return next(wheels.glob("horovod-*.whl"))


def fetch_source(
    folder: Path, download: Sequence[str], steps: Steps, env: Mapping[str, str]
) -> Path:
    """Fetch the source of Horovod, and return its folder.

    Raises:
        RuntimeError: If it cannot be fetched, or another one is: nothing of it is run.
    """
    pinned = folder / "horovod.txt"
    pinned.write_text(f"horovod=={HOROVOD} --hash=sha256:{SOURCE_HASH}\n")
    options = ["--no-binary", "horovod", "--require-hashes", "-r", str(pinned)]
    command = [*download, *options, "-d", str(folder)]
    steps.run("Fetching the source of Horovod", command, env=env)
    archive = next(folder.glob("horovod-*.tar.gz"))
    # Python 3.11.3 and older have no filter.
    safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    shutil.unpack_archive(archive, folder / "source", **safe)
    return next((folder / "source").glob("horovod-*"))


def local_version(tensorflow: str | None, choice: Choice) -> str:
    """Return what follows the `+` in the version of our Horovod.

    pip takes a wheel of exactly this version: for this TensorFlow, with these
    transports, and with the patches of this keras_dist.

    >>> local_version("2.21.0", Choice(mpi=True))[:-9]
    'keras.dist.tf2.21.gloo.mpi.'
    """
    # Patch releases of TensorFlow take the same Horovod.
    minor = format_version(parse_version(tensorflow or ""))
    transports = "gloo" + ".mpi" * choice.mpi + ".nccl" * choice.nccl
    return f"keras.dist.tf{minor}.{transports}.{digest_patches()}"


def digest_patches() -> str:
    """Return a digest of our changes, with which the version of our Horovod ends."""
    digest = hashlib.sha256(CXX_FLAG.encode())
    for path in patch_files():
        digest.update(path.read_bytes())
    # With a letter in front: of digits alone pip would drop a leading 0.
    return f"p{digest.hexdigest()[:8]}"


def build_environment(
    environ: Mapping[str, str], facts: Facts, choice: Choice, folder: Path
) -> dict[str, str]:
    """Return the environment variables of the build.

    Args:
        environ: The user's environment variables. All are kept except `HOROVOD_…`,
            of which only `HOROVOD_BUILD_…` are; the user's compiler and linker flags
            are extended.
        facts: What this environment has.
        choice: Transports to build with.
        folder: Folder with the build tools and, if it is chosen, NCCL.
    """
    env = {
        name: value
        for name, value in environ.items()
        if not name.startswith("HOROVOD_") or name.startswith(_PASSED_PREFIX)
    }
    tools, nccl_home = str(folder / "tools"), folder / "nccl"
    folders = [f"{tools}/bin"]
    linker_flags = [environ.get("LDFLAGS", ""), _LINKER_FLAG]
    if choice.nccl and facts.cuda_home and facts.nccl:
        folders.append(f"{facts.cuda_home}/bin")
        site_packages = Path(sysconfig.get_path("platlib"))
        linker_flags.append(rpath_flag(facts.nccl.library.parent, site_packages))
        env |= {
            "HOROVOD_CUDA_HOME": str(facts.cuda_home),
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_HOME": str(nccl_home),
            "HOROVOD_NCCL_INCLUDE": str(nccl_home / "include"),
            "HOROVOD_NCCL_LIB": str(nccl_home / "lib"),
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    return env | {
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CXXFLAGS": f"{environ.get('CXXFLAGS', '')} {CXX_FLAG}".strip(),
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if choice.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "LDFLAGS": " ".join(filter(None, linker_flags)),
        "MAKEFLAGS": environ.get("MAKEFLAGS") or f"-j{len(os.sched_getaffinity(0))}",
        "PATH": os.pathsep.join(filter(None, [*folders, environ.get("PATH")])),
        "PYTHONPATH": os.pathsep.join(filter(None, [tools, environ.get("PYTHONPATH")])),
    }


def rpath_flag(folder: Path, site_packages: Path) -> str:
    """Return the linker flag by which Horovod's library loads another from a folder.

    A folder in `site_packages` is named as seen from Horovod's library, so that its
    wheel can be moved.

    >>> rpath_flag(Path("/opt/nccl/lib"), Path("/e"))
    '-Wl,-rpath,/opt/nccl/lib'
    >>> rpath_flag(Path("/e/nvidia/nccl/lib"), Path("/e"))
    "'-Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib'"
    """
    name = str(folder)
    if folder.is_relative_to(site_packages):
        name = f"$ORIGIN/../../{folder.relative_to(site_packages)}"
    return shlex.quote(f"-Wl,-rpath,{name}")


def link_nccl(nccl: Nccl, home: Path) -> None:
    """Make a folder `home` in which Horovod's CMake files find NCCL.

    The wheel on PyPI has no `libnccl.so`, only `libnccl.so.2`. A symbolic link would be
    enough for the linker. But CMake would add the folder of the link, which is a
    temporary one, to the library's run path; later any user of the machine could put
    another `libnccl.so` there. So the link is a linker script instead, with the name of
    a static library, for which CMake adds no run path.
    """
    (home / "include").mkdir(parents=True)
    (home / "lib").mkdir()
    for header in nccl.include.glob("nccl*"):
        (home / "include" / header.name).symlink_to(header)
    script = f'INPUT("{nccl.library}")\n'
    (home / "lib" / "libnccl.a").write_text(script)


def link_cuda(toolkit: Path, home: Path) -> Path:
    """Make a folder in which nvcc and CMake find a CUDA toolkit of wheels.

    The wheels on PyPI have their libraries in `lib`, where nvcc 13.0 and CMake look in
    `lib64`. They have no `libcudart.so`, without which CMake finds no toolkit. nvcc
    finds its files from `bin/..`, so `bin` is a folder here, with a link to each file.

    Args:
        toolkit: Folder of a CUDA toolkit.
        home: The folder to make; any other toolkit than one of wheels is returned.
    """
    runtimes = sorted((toolkit / "lib").glob("libcudart.so.*"))
    if not runtimes or (toolkit / "lib64").exists():
        return toolkit
    for source, target in (("bin", "bin"), ("lib", "lib64")):
        (home / target).mkdir(parents=True)
        for path in (toolkit / source).iterdir():
            (home / target / path.name).symlink_to(path)
    library = home / "lib64" / "libcudart.so"
    if not library.exists():
        library.symlink_to(runtimes[-1])
    (home / "lib").symlink_to("lib64")  # where nvcc 13.5 looks
    for name in ("include", "nvvm"):
        (home / name).symlink_to(toolkit / name)
    return home


def patch_files() -> list[Path]:
    """Return the files of our changes, in the order in which they are applied."""
    return sorted((Path(__file__).parent / "patches").glob("*.patch"))


def apply(source: Path, patch: str) -> str:
    """Apply a patch of one hunk to a source, and return the first line of its reason.

    Raises:
        RuntimeError: If the lines to change are not there exactly once.
    """
    reason, _, diff = patch.partition("--- a/")
    path = source / diff.partition("\n")[0]
    hunk = diff.partition("\n@@ ")[2].splitlines()[1:]
    before = "".join(f"{line[1:]}\n" for line in hunk if line[:1] != "+")
    after = "".join(f"{line[1:]}\n" for line in hunk if line[:1] != "-")
    text = path.read_text() if path.is_file() else ""
    if (count := text.count(before)) != 1:
        raise RuntimeError(
            "The source of Horovod is not the one that keras_dist's patch was made "
            f"for. Received: {count} places to change in {path}, instead of 1. "
            "Check which index or mirror pip uses with `pip config list`."
        )
    path.write_text(text.replace(before, after))
    return reason.splitlines()[0]
