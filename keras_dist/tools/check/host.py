"""The outcome of one check; and what is installed on this host, without ranks."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from keras_dist.launch.hosts import addresses, ranks_in_words
from keras_dist.tools.install.facts import CUDA
from keras_dist.tools.install.recipe import Built, probe
from keras_dist.version import (
    FIRST_TENSORFLOW,
    KERAS,
    LAST_TENSORFLOW,
    TENSORFLOW,
    TENSORFLOW_RANGE,
    __version__,
    installed_tensorflow,
    parse_version,
)

# A warning is a check that passed, but deserves a look.
Status = Literal["ok", "failed", "warning"]

# The beginning of a line of output that is a report.
_MARK = "@keras-dist-check@ "

_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_SECONDS = 20.0


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Args:
        name: Name of the check.
        status: The outcome.
        seen: What was seen, in words.
        cure: What to do; empty if nothing.
    """

    name: str
    status: Status
    seen: str
    cure: str = ""

    def line(self) -> str:
        """Return the line that a rank prints for the command."""
        return _MARK + json.dumps(dataclasses.asdict(self))


def parse_line(line: str) -> Result | None:
    """Parse a line of output; `None` if it reports no result.

    >>> parse_line("[1] " + Result("devices", "ok", "CPU").line()).seen
    'CPU'
    >>> parse_line("[1] loss: 0.25") is None
    True
    """
    _, mark, text = line.partition(_MARK)
    return Result(**json.loads(text)) if mark else None


def by_value(values: Sequence[Any], hosts: Sequence[str]) -> str:
    """Say which ranks, on which hosts, have which value.

    >>> by_value(["2.21.0", "2.21.0", "2.20.0"], ["a", "a", "b"])
    '2.21.0 on ranks 0, 1 (a), 2.20.0 on rank 2 (b)'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(f"{text} on {name_ranks(ranks[text], hosts)}" for text in ranks)


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks and their hosts.

    >>> name_ranks([1, 2], ["a", "b", "b"]), name_ranks([0], ["localhost"])
    ('ranks 1, 2 (b)', 'rank 0')
    """
    names = dict.fromkeys(hosts[rank] for rank in ranks)
    where = "" if len(set(hosts)) == 1 else f" ({', '.join(names)})"
    return f"{ranks_in_words(ranks)}{where}"


def check_host() -> Iterator[Result]:
    """Check what is installed on this host, and yield each result."""
    yield check_versions(installed_versions())
    built, error = probe()
    yield check_horovod(built, error)
    yield check_gpus(*list_gpus(), built)
    cores, node = len(os.sched_getaffinity(0)), platform.node()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    system = f"{node}: {platform.platform()}, {cores} cores, {memory:.1f} GiB"
    yield Result("system", "ok", system)
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
    if not all(number for name, number in versions.items() if name != "Horovod"):
        cure = f"pip install '{TENSORFLOW}' '{KERAS}'"
        return Result("versions", "failed", seen, cure)
    minor = parse_version(versions["TensorFlow"])
    if not FIRST_TENSORFLOW <= minor <= LAST_TENSORFLOW:
        cure = f"keras_dist was tried with TensorFlow {TENSORFLOW_RANGE}."
        return Result("versions", "warning", seen, cure)
    return Result("versions", "ok", seen)


def check_horovod(built: Built | None, error: str) -> Result:
    """Check that Horovod, if it is installed, can be imported, and has the patches."""
    if importlib.util.find_spec("horovod") is None:
        seen = "not installed: ranks use TensorFlow's own collectives"
        return Result("Horovod", "ok", seen)
    if built is None:
        return Result("Horovod", "failed", error, "keras-dist install-horovod")
    seen, patches = str(built).splitlines()
    if not built.is_patched:
        return Result("Horovod", "warning", seen, patches)
    return Result("Horovod", "ok", seen)


def check_gpus(gpus: list[str], error: str, built: Built | None) -> Result:
    """Check that TensorFlow and Horovod are built for the GPUs of this host."""
    if error:
        cure = (
            "If this host has GPUs: load the driver, or start the container with them."
        )
        return Result("GPUs", "warning", f"nvidia-smi lists none: {error}", cure)
    if not gpus or built is None:
        seen = ", ".join(gpus) or "no nvidia-smi: ranks compute on CPUs"
        return Result("GPUs", "ok", seen)
    seen = f"{len(gpus)} × {', '.join(dict.fromkeys(gpus))}; "
    seen += f"TensorFlow is built for CUDA {built.cuda or 'none'}"
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
