"""The first stage: are the ranks' facts equal, and do the hosts reach each other?

It uses no collective, and imports TensorFlow as late as possible: the ranks read the
facts of the others in the launcher's store.
"""

import argparse
import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras_dist
from keras_dist.launch import horovod_library
from keras_dist.launch.hosts import LOOPBACK, Slot
from keras_dist.launch.store import StoreClient, client_of
from keras_dist.tools.check import network
from keras_dist.tools.check.checks import (
    Found,
    Reporting,
    by_value,
    failed,
    named,
    ok,
    untried,
    warning,
)
from keras_dist.tools.check.gpus import gpus
from keras_dist.tools.install.facts import is_supported
from keras_dist.version import (
    KERAS,
    TENSORFLOW,
    TENSORFLOW_RANGE,
    TENSORFLOWS,
    __version__,
)

# Seconds for which a rank waits for the others, which import TensorFlow.
_SECONDS, _PAUSE = 240.0, 0.2

_INSTALL = "Run `keras-dist install-horovod` there."

_PACKAGES = {
    "TensorFlow": TENSORFLOWS,
    "Keras": ("keras",),
    "Horovod": ("horovod",),
    "NumPy": ("numpy",),
}
_GIB = 2**30


def run(options: argparse.Namespace) -> None:
    """Try the checks of this stage; all ranks call it."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    numbers = {name: int(os.environ[f"HOROVOD_{name.upper()}"]) for name in names}
    slot = Slot(host=os.environ["HOROVOD_HOSTNAME"], **numbers)
    store = client_of()
    assert store is not None  # the launcher has started this rank
    begin = time.time()
    report = Reporting("environment", options.checks)
    report.check("start", lambda: ok(started(_exchange(store, slot, "start", begin))))
    only = LOOPBACK if slot.local_size == slot.size else ""
    answerer = network.Answerer(only) if slot.local_rank == 0 else None
    own = {**facts(options.script), "host": slot.host, "local_rank": slot.local_rank}
    if answerer is not None:
        own["network"] = network.host_facts(answerer)
    found = _exchange(store, slot, "facts", own)
    hosts = [each["host"] for each in found]
    for name, verdict in VERDICTS.items():
        report.check(name, verdict, found, hosts)
    networks = [each["network"] for each in found if "network" in each]
    tried = []
    if answerer is not None:
        number = sum(1 for each in found[: slot.rank] if "network" in each)
        tried = network.reach(number, networks)
    reached = _exchange(store, slot, "reached", tried)
    of_hosts = [r for r, each in zip(reached, found, strict=True) if "network" in each]
    is_patched = [bool(each.get("is_patched")) for each in found if "network" in each]
    report.check("network", network.network, networks, of_hosts)
    report.check("names", network.names, networks, of_hosts, is_patched)
    report.check("clocks", network.clocks, networks, of_hosts)
    _exchange(store, slot, "end", True)  # before the answers of this host end
    if answerer is not None:
        answerer.close()


def _exchange(store: StoreClient, slot: Slot, purpose: str, value: Any) -> list[Any]:
    """Exchange values by the launcher's store, and return them in rank order.

    Raises:
        TimeoutError: If a rank has written none in time.
    """
    prefix = f"check.{purpose}."
    end = time.monotonic() + _SECONDS
    store.put(f"{prefix}{slot.rank}", [value])
    while True:
        found = store.get_all(prefix) or {}
        values = [found.get(f"{prefix}{rank}") for rank in range(slot.size)]
        if None not in values:
            return [value for (value,) in values]  # type: ignore[misc]
        if time.monotonic() > end:
            missing = [rank for rank, each in enumerate(values) if each is None]
            raise TimeoutError(f"waited {_SECONDS:g} s for ranks {missing}: {purpose}")
        time.sleep(_PAUSE)


def facts(script: str) -> dict[str, Any]:
    """Collect all facts of this rank, as values of JSON, without a collective.

    Args:
        script: Path of the user's script; empty for none.
    """
    listed = gpus()
    return {
        "versions": installed_versions(),
        **_loaded(),
        "driver": listed[0].driver if listed else "",
        "gpus": [gpu.name for gpu in listed],
        "code": {
            "keras_dist": digest_of_folder(Path(keras_dist.__file__).parent),
            **({script: digest_of_file(Path(script))} if script else {}),
        },
        "system": host_system(),
    }


def installed_versions() -> dict[str, str]:
    """Return the installed versions; empty where nothing is installed."""
    found = {"Python": platform.python_version(), "keras_dist": __version__}
    for title, names in _PACKAGES.items():
        found[title] = ""
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[title] = found[title] or importlib.metadata.version(name)
    return found


def _loaded() -> dict[str, Any]:
    """Import TensorFlow and Horovod, and say for what they were built."""
    found: dict[str, Any] = {"errors": {}, "built": [], "nccl": 0, "cuda": {}}
    try:
        tensorflow = importlib.import_module("tensorflow")
    except Exception as error:  # a library of the system may be missing
        found["errors"]["TensorFlow"] = f"{type(error).__name__}: {error}"
        return found
    found["imported"] = as_in_metadata(tensorflow.__version__)
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
    """Hash all Python files of a folder, and their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        digest.update(f"{name}\n{digest_of_file(path)}\n".encode())
    return digest.hexdigest()[:12]


def digest_of_file(path: Path) -> str:
    """Hash a file; return the error if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return error.strerror or str(error)


def host_system() -> dict[str, Any]:
    """Describe operating system, processor, cores and memory of this host."""
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


def started(begins: Sequence[float]) -> str:
    """Say how many ranks were started."""
    later = max(begins) - min(begins)
    count = len(begins)
    return f"{count} rank{'s' * (count > 1)}, the last {later:.1f} s after the first"


def as_in_metadata(version: str) -> str:
    """Write what TensorFlow says of itself as its metadata do.

    >>> [as_in_metadata(text) for text in ("2.22.0-rc0", "2.23.0-dev2026", "2.21.0")]
    ['2.22.0rc0', '2.23.0.dev2026', '2.21.0']
    """
    return version.replace("-rc", "rc").replace("-dev", ".dev")


def versions(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Check that all packages have equal versions, and TensorFlow a supported one."""
    own = found[0]["versions"]
    differing = _differing("versions", found, hosts)
    missing = [name for name, version in own.items() if not version]
    if differing:
        return failed(
            "; ".join(differing),
            "Install the same versions on all hosts, and keras-dist install-horovod "
            "after that: Horovod is built for one TensorFlow.",
        )
    errors = _errors_of("TensorFlow", found, hosts)
    if errors or missing:
        return failed(
            errors or f"not installed: {', '.join(missing)}",
            f"Install it in this environment: pip install '{TENSORFLOW}' '{KERAS}', "
            "then keras-dist install-horovod.",
        )
    texts = [f"{name} {version}" for name, version in own.items()]
    seen = ", ".join(texts)
    mixed = [each["imported"] for each in found]
    if len({*mixed, own["TensorFlow"]}) > 1:
        return failed(
            f"TensorFlow {own['TensorFlow']} is installed, but what is imported is "
            f"{by_value(mixed, hosts)}",
            "Two installations are mixed: look at PYTHONPATH and `pip list` there.",
        )
    if not all(each["is_supported"] for each in found):
        return warning(
            seen, f"keras_dist was tried with TensorFlow {TENSORFLOW_RANGE}."
        )
    return ok(seen, **own)


def horovod(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Check that Horovod can be loaded, with the same transports on all ranks."""
    errors = _errors_of("Horovod", found, hosts)
    if errors:
        return failed(errors, _INSTALL)
    if any(each["errors"] for each in found):
        return untried("TensorFlow cannot be imported")
    built = [_transports(each) for each in found]
    if len(set(built)) > 1:
        return failed(
            by_value(built, hosts),
            "Build Horovod with the same transports on all hosts: "
            "keras-dist install-horovod, with --mpi or --nccl.",
        )
    without = [rank for rank, each in enumerate(found) if not each["is_patched"]]
    if without and len(set(hosts)) > 1:
        return warning(
            f"{built[0]}; without keras_dist's patch on {named(without, hosts)}",
            "Without it Horovod takes the network of the host's own name. " + _INSTALL,
        )
    patched = "" if without else ", with keras_dist's patch for several networks"
    return ok(f"built with {built[0]}{patched}", transports=found[0]["built"])


def cuda(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Check that driver, CUDA and NCCL are equal where there are GPUs."""
    if not any(each["gpus"] for each in found):
        return untried("nvidia-smi lists no GPU on any host: ranks compute on CPUs")
    texts = [_cuda_of(each) for each in found]
    if len(set(texts)) > 1:
        return failed(
            by_value(texts, hosts),
            "Install the same TensorFlow (with CUDA) and Horovod on all hosts. A "
            "driver that differs is no error for CUDA, but NCCL needs them alike.",
        )
    if not found[0]["cuda"]:
        return failed(
            f"{texts[0]}; this TensorFlow was built without CUDA",
            "pip install 'tensorflow[and-cuda]', then keras-dist install-horovod.",
        )
    if not found[0]["nccl"]:
        return warning(
            texts[0],
            "Horovod is built without NCCL, so gradients go through the CPU. NCCL "
            "needs nvcc: keras-dist install-horovod --nccl",
        )
    return ok(texts[0])


def code(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Check that package and script of the user are equal on all hosts."""
    names = found[0]["code"]
    differing = _differing("code", found, hosts, separator=": ")
    if differing:
        return failed(
            "; ".join(differing),
            "Copy the same files to all hosts, or start in a folder that all share.",
        )
    unread = [n for n, text in names.items() if " " in text]
    if unread:
        return failed(f"{unread[0]}: {names[unread[0]]}", "Name a file that is there.")
    return ok(", ".join(f"{name} {text}" for name, text in names.items()), **names)


def system(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Describe the hosts, for a bug report."""
    texts = [_system_of(each["system"]) for each in found]
    seen = texts[0] if len(set(texts)) == 1 else by_value(texts, hosts)
    return ok(seen, **found[0]["system"])


Verdict = Callable[[Sequence[Mapping[str, Any]], Sequence[str]], Found]

VERDICTS: dict[str, Verdict] = {
    "versions": versions,
    "Horovod": horovod,
    "CUDA": cuda,
    "code": code,
    "system": system,
}


def _differing(
    kind: str,
    found: Sequence[Mapping[str, Any]],
    hosts: Sequence[str],
    separator: str = " ",
) -> list[str]:
    """Say for each fact of a kind that differs which ranks have which value."""
    values = {
        name: [each[kind].get(name, "") for each in found] for name in found[0][kind]
    }
    return [
        f"{name}{separator}{by_value(own, hosts)}"
        for name, own in values.items()
        if len(set(own)) > 1
    ]


def _errors_of(
    name: str, found: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> str:
    """Return the error of the ranks where a package cannot be imported."""
    with_error = [rank for rank, each in enumerate(found) if name in each["errors"]]
    if not with_error:
        return ""
    text = found[with_error[0]]["errors"][name]
    return f"{named(with_error, hosts)}: {text}"


def _transports(own: Mapping[str, Any]) -> str:
    known = {"gloo": "Gloo", "mpi": "MPI"}
    found = [known[name] for name in own["built"]] + ["NCCL"] * bool(own["nccl"])
    return ", ".join(found)


def _cuda_of(own: Mapping[str, Any]) -> str:
    texts = [f"driver {own['driver']}"]
    texts += [f"{name} {version}" for name, version in own["cuda"].items()]
    number = own["nccl"]
    if number > 1:
        texts += [f"NCCL {number // 10000}.{number // 100 % 100}.{number % 100}"]
    return ", ".join(texts)


def _system_of(own: Mapping[str, Any]) -> str:
    cores = f"{own['cores']} core{'s' * (own['cores'] > 1)}"
    return (
        f"{own['os'] or own['kernel']}, {own['kernel']}, {own['processor']}, "
        f"{cores}, {own['memory_gib']} GiB"
    )
