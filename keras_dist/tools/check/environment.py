"""The first stage: are the ranks' facts equal, and do the hosts reach each other?

It uses no collective and does not import TensorFlow before it has to: the ranks read
what the others have found in the launcher's store.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from keras_dist.launch.hosts import LOOPBACK, Slot
from keras_dist.launch.monitor.status_store import StatusStore
from keras_dist.tools.check import network
from keras_dist.tools.check.facts import facts
from keras_dist.tools.check.hosts import Answerer, host_facts, reach
from keras_dist.tools.check.reporting import (
    Found,
    Reporting,
    by_value,
    failed,
    named,
    ok,
    untried,
    warning,
)

# Seconds for which a rank waits for others, which import TensorFlow.
_SECONDS, _PAUSE = 240.0, 0.2

_INSTALL = "Run `keras-dist install-horovod` there."


def run(checks: Collection[str], script: str, slot: Slot, store: StatusStore) -> None:
    """Try the checks of this stage; all ranks call it.

    Args:
        checks: Names of the checks to try.
        script: Path of the user's script; empty for none.
        slot: The slot of this rank.
        store: The launcher's store.
    """
    begin = time.time()
    report = Reporting("environment", checks)
    report.check("start", lambda: ok(started(_exchange(store, slot, "start", begin))))
    only = LOOPBACK if slot.local_size == slot.size else ""
    answerer = Answerer(only) if slot.local_rank == 0 else None
    own = {**facts(script), "host": slot.host, "local_rank": slot.local_rank}
    if answerer is not None:
        own["network"] = host_facts(answerer)
    found = _exchange(store, slot, "facts", own)
    hosts = [each["host"] for each in found]
    for name, verdict in VERDICTS.items():
        report.check(name, verdict, found, hosts)
    networks = [each["network"] for each in found if "network" in each]
    tried = []
    if answerer is not None:
        number = sum(1 for each in found[: slot.rank] if "network" in each)
        tried = reach(number, networks)
    reached = _exchange(store, slot, "reached", tried)
    of_hosts = [r for r, each in zip(reached, found, strict=True) if "network" in each]
    is_patched = [bool(each.get("is_patched")) for each in found if "network" in each]
    report.check("network", network.network, networks, of_hosts)
    report.check("names", network.names, networks, of_hosts, is_patched)
    report.check("clocks", network.clocks, networks, of_hosts)
    _exchange(store, slot, "end", True)  # before the answers of this host end
    if answerer is not None:
        answerer.close()


def _exchange(store: StatusStore, slot: Slot, purpose: str, value: Any) -> list[Any]:
    """The values of all ranks, in rank order.

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


def started(begins: Sequence[float]) -> str:
    """How many ranks were started, in words."""
    later = max(begins) - min(begins)
    count = len(begins)
    return f"{count} rank{'s' * (count > 1)}, the last {later:.1f} s after the first"


def versions(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Are the versions of all packages equal, and is TensorFlow one that we support?"""
    own = found[0]["versions"]
    differing = [
        f"{name} {by_value([each['versions'].get(name, '') for each in found], hosts)}"
        for name in own
        if len({each["versions"].get(name, "") for each in found}) > 1
    ]
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
            "Install it in this environment: pip install 'tensorflow>=2.18,<2.22' "
            "'keras>=3.5', then keras-dist install-horovod.",
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
        return warning(seen, "keras_dist was tried with TensorFlow 2.18 to 2.21.")
    return ok(seen, **own)


def horovod(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Can Horovod be loaded, and has it the same transports on all ranks?"""
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
    """Are driver, CUDA and NCCL equal where there are GPUs?"""
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
    """Is the code of the package, and of the user's script, equal on all hosts?"""
    names = found[0]["code"]
    differing = [
        f"{name}: {by_value([each['code'].get(name) for each in found], hosts)}"
        for name in names
        if len({each["code"].get(name) for each in found}) > 1
    ]
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
    """What the hosts are: for a report of an error."""
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


def _errors_of(
    name: str, found: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> str:
    """What was said on the ranks where a package cannot be imported."""
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
