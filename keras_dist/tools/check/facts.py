"""Facts of one rank: versions, Horovod, CUDA, code and system. No collective."""

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import keras_dist
from keras_dist.launch import horovod_library
from keras_dist.tools.check.gpus import gpus
from keras_dist.tools.install.facts import is_supported
from keras_dist.version import __version__

_PACKAGES = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "Keras": ("keras",),
    "Horovod": ("horovod",),
    "NumPy": ("numpy",),
}
_GIB = 2**30


def facts(script: str) -> dict[str, Any]:
    """All facts of this rank, as values of JSON.

    Args:
        script: Path of the user's script; empty for none.
    """
    listed = gpus()
    return {
        "versions": versions(),
        **_loaded(),
        "driver": listed[0].driver if listed else "",
        "gpus": [gpu.name for gpu in listed],
        "code": {
            "keras_dist": digest_of_folder(Path(keras_dist.__file__).parent),
            **({script: digest_of_file(Path(script))} if script else {}),
        },
        "system": system(),
    }


def versions() -> dict[str, str]:
    """The installed versions; empty for what is not there."""
    found = {"Python": platform.python_version(), "keras_dist": __version__}
    for title, names in _PACKAGES.items():
        found[title] = ""
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[title] = found[title] or importlib.metadata.version(name)
    return found


def _loaded() -> dict[str, Any]:
    """What can be imported: TensorFlow and what it was built for, and Horovod."""
    found: dict[str, Any] = {"errors": {}, "built": [], "nccl": 0, "cuda": {}}
    try:
        tensorflow = importlib.import_module("tensorflow")
    except Exception as error:  # a library of the system may be missing
        found["errors"]["TensorFlow"] = f"{type(error).__name__}: {error}"
        return found
    found["imported"] = tensorflow.__version__
    found["is_supported"] = is_supported(tensorflow.__version__)
    build = tensorflow.sysconfig.get_build_info()
    found["cuda"] = {
        name: str(build[key])
        for name, key in (("CUDA", "cuda_version"), ("cuDNN", "cudnn_version"))
        if key in build
    }
    found["is_patched"] = horovod_library.uses_named_network()
    try:
        comm = importlib.import_module("keras_dist.comm")
        found["built"] = comm.built_transports()
        found["nccl"] = comm.nccl_version()
    except Exception as error:  # built for another TensorFlow, for example
        found["errors"]["Horovod"] = str(error)
    return found


def digest_of_folder(folder: Path) -> str:
    """A hash of all Python files of a folder, and of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        digest.update(f"{name}\n{digest_of_file(path)}\n".encode())
    return digest.hexdigest()[:12]


def digest_of_file(path: Path) -> str:
    """A hash of a file; its error if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return error.strerror or str(error)


def system() -> dict[str, Any]:
    """Operating system, processor, cores and memory of this host."""
    return {
        "kernel": f"{platform.system()} {platform.release()}",
        "os": platform.freedesktop_os_release().get("PRETTY_NAME", "")
        if Path("/etc/os-release").exists()
        else "",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory() / _GIB, 1),
        "python": sys.executable,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> int:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return min(pages, int(Path(path).read_text()))
    return pages
