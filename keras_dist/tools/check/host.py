"""What is installed on this host: the checks that need no ranks."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping

from keras_dist.launch.network import addresses
from keras_dist.tools.check.results import Result
from keras_dist.tools.install.facts import CUDA, is_supported
from keras_dist.tools.install.installed import Built, probe
from keras_dist.tools.install.steps import remedy_for
from keras_dist.version import (
    KERAS,
    TENSORFLOW,
    TENSORFLOW_RANGE,
    __version__,
    installed_tensorflow,
)

_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_SECONDS = 20.0


def check_host() -> Iterator[Result]:
    """Check what is installed on this host, and yield each result."""
    yield check_versions(installed_versions())
    built, error = probe()
    yield check_horovod(built, error)
    yield check_gpus(*list_gpus(), built)
    yield Result("system", "ok", describe_system())
    yield Result("network", "ok", ", ".join(map(" ".join, addresses().items())))


def installed_versions() -> dict[str, str]:
    """Return the installed versions; empty where a package is not installed."""
    versions = {
        "Python": platform.python_version(),
        "keras_dist": __version__,
        "TensorFlow": installed_tensorflow()[1] or "",
    }
    for package in ("Keras", "Horovod", "NumPy"):
        versions[package] = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package.lower())
    return versions


def check_versions(versions: Mapping[str, str]) -> Result:
    """Check that all packages are installed, and TensorFlow in the range."""
    seen = ", ".join(f"{name} {number or 'none'}" for name, number in versions.items())
    if "" in versions.values():
        cure = f"pip install '{TENSORFLOW}' '{KERAS}' && keras-dist install-horovod"
        return Result("versions", "failed", seen, cure, versions)
    if not is_supported(versions["TensorFlow"]):
        cure = f"keras_dist was tried with TensorFlow {TENSORFLOW_RANGE}."
        return Result("versions", "warning", seen, cure, versions)
    return Result("versions", "ok", seen, data=versions)


def check_horovod(built: Built | None, error: str) -> Result:
    """Check that Horovod can be imported, and has keras_dist's patches."""
    if built is None:
        cure = remedy_for(error) or "keras-dist install-horovod"
        return Result("Horovod", "failed", error, cure)
    seen, patches = str(built).splitlines()
    if not built.is_patched:
        return Result("Horovod", "warning", seen, patches, vars(built))
    return Result("Horovod", "ok", seen, data=vars(built))


def check_gpus(gpus: list[str], error: str, built: Built | None) -> Result:
    """Check that TensorFlow and Horovod are built for the GPUs of this host."""
    if error:
        cure = (
            "If this host has GPUs: load the driver, or start the container with them."
        )
        return Result("GPUs", "warning", f"nvidia-smi lists none: {error}", cure)
    if not gpus:
        return Result("GPUs", "untried", "no nvidia-smi: ranks compute on CPUs")
    seen = f"{len(gpus)} × {', '.join(dict.fromkeys(gpus))}"
    if built is None:
        return Result("GPUs", "untried", seen)
    seen += f"; TensorFlow is built for CUDA {built.cuda or 'none'}"
    if not built.cuda:
        cure = "pip install 'tensorflow[and-cuda]', then keras-dist install-horovod"
        return Result("GPUs", "failed", seen, cure)
    if not built.nccl:
        cure = f"pip install '{CUDA}' && keras-dist install-horovod --nccl"
        seen += "; without NCCL gradients go through the memory of the CPU"
        return Result("GPUs", "warning", seen, cure)
    return Result("GPUs", "ok", seen)


def list_gpus() -> tuple[list[str], str]:
    """Return model and driver of each GPU, or what nvidia-smi says instead."""
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"no answer in {_SECONDS:.0f} s"
    except OSError:
        return [], ""
    lines = (done.stdout or done.stderr).strip().splitlines()
    gpus = [", driver ".join(line.split(", ")) for line in lines if ", " in line]
    if done.returncode == 0 and gpus:
        return gpus, ""
    return [], lines[0][:200] if lines else f"exit code {done.returncode}, no output"


def describe_system() -> str:
    """Describe name, operating system, cores and memory of this host."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    system = f"{platform.node()}: {platform.platform()}"
    return f"{system}, {cores} cores, {memory / 2**30:.1f} GiB"
