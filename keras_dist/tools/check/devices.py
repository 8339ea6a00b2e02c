"""The second stage: do the ranks connect, and has each a device of its own?"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

from keras_dist import comm
from keras_dist.tools.check import gpus
from keras_dist.tools.check.checks import (
    Found,
    Reporting,
    by_value,
    failed,
    named,
    ok,
    own_host,
    size_in_words,
    untried,
    warning,
)

# Memory that a training needs at least, bytes; and size of the matrices.
_LEAST, _SIZE = 2**30, 1024

# Part of a GPU's memory that its driver does not use by itself.
_USED = 0.05
_REPEATS = 3


def run(options: argparse.Namespace) -> None:
    """Try the checks of this stage; all ranks call it."""
    report = Reporting("devices", options.checks)
    begin = time.perf_counter()
    comm.init()
    seconds = time.perf_counter() - begin
    name = comm.transport_name()
    text = f"{comm.size()} ranks over {name} in {seconds:.1f} s"
    only = "one rank, which needs no connection"
    seen = ok(text if comm.size() > 1 else only, transport=name)
    report.check("connect", lambda: seen, group="environment")
    listed = gpus.gpus()
    product = _product()  # also makes the process one that nvidia-smi lists
    found = comm.gather(_facts(listed, product))
    hosts = [own["host"] for own in found]
    report.check("device", device, found, hosts)
    report.check("memory", memory, found, hosts)
    report.check("cores", cores, found, hosts)
    report.check("matmul", matmul, found, hosts)


def _facts(listed: Sequence[gpus.Gpu], product: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the device of this rank."""
    device = comm.device()
    has_gpu = device.kind == "GPU"
    index = device.index if has_gpu else comm.local_rank()
    uuid = gpus.uuid_of_rank(listed, index=index, has_gpu=has_gpu) if listed else ""
    own = [gpu for gpu in listed if gpu.uuid == uuid]
    free = psutil.virtual_memory().available
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return {
        "host": own_host(),
        "device": str(device),
        "kind": device.kind,
        "num_listed": len(listed),
        "uuid": uuid,
        "gpu": own[0].name if own else "",
        "error": gpus.error() if not listed else "",
        "free": own[0].total - own[0].used if has_gpu and own else free,
        "total": own[0].total if own else 0,
        "used": own[0].used if has_gpu and own else 0,
        "process": os.getpid(),
        "computing": [each for each in gpus.processes() if each[0] == uuid],
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": threads,
        **product,
    }


def device(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Check that each rank has a GPU that no other has."""
    texts = [f"{uuid}: {named(ranks, hosts)}" for uuid, ranks in _with_same_gpu(found)]
    if texts:
        return failed(
            f"several ranks have the same GPU: {'; '.join(texts)}",
            "Start at most as many ranks on a host as it has GPUs, and give each rank "
            "its own: no CUDA_VISIBLE_DEVICES with one GPU for several ranks.",
        )
    blind = [
        r for r, own in enumerate(found) if own["num_listed"] and not _has_gpu(own)
    ]
    if blind:
        return failed(
            f"nvidia-smi lists {found[blind[0]]['num_listed']} GPUs, TensorFlow sees "
            f"none on {named(blind, hosts)}",
            "pip install 'tensorflow[and-cuda]', and see that the driver is new enough "
            "for its CUDA; CUDA_VISIBLE_DEVICES must not be empty.",
        )
    if not any(_has_gpu(own) for own in found):
        return _without_gpus(found, hosts)
    without = [rank for rank, own in enumerate(found) if not _has_gpu(own)]
    if without:
        return failed(
            f"a GPU on some ranks, but none on {named(without, hosts)}",
            "Leave out hosts without GPUs, or hide the GPUs: CUDA_VISIBLE_DEVICES=-1.",
        )
    unknown = [rank for rank, own in enumerate(found) if not own["uuid"]]
    if unknown:
        return warning(
            f"the UUID of the GPU is not known on {named(unknown, hosts)}",
            "Without nvidia-smi and CUDA's driver it cannot be seen whether two ranks "
            "have the same GPU.",
        )
    texts = [
        f"rank {rank}: {own['gpu']} {own['uuid']}" for rank, own in enumerate(found)
    ]
    return ok("; ".join(texts), uuids=[own["uuid"] for own in found])


def _without_gpus(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Find out why no rank has a GPU: there is none, or its driver does not answer."""
    seen = f"no GPU: {by_value([own['device'] for own in found], hosts)}"
    broken = [rank for rank, own in enumerate(found) if own["error"]]
    if not broken:
        return untried(seen)
    error = found[broken[0]]["error"]
    return warning(
        f"{seen}; nvidia-smi lists none on {named(broken, hosts)}: {error}",
        "Where the host has GPUs: its driver is not loaded or does not fit, or the "
        "container was started without them.",
    )


def _with_same_gpu(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    """Return the UUIDs of GPUs that several ranks have, with the ranks."""
    owners: dict[str, list[int]] = {}
    for rank, own in enumerate(found):
        if own["uuid"]:
            owners.setdefault(own["uuid"], []).append(rank)
    return [(uuid, ranks) for uuid, ranks in owners.items() if len(ranks) > 1]


def memory(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Check that there is free memory, and nobody else on the GPUs."""
    own_processes = {(own["host"], own["process"]) for own in found}
    strangers = {
        f"{uuid} on {own['host']}: process {process}, {size_in_words(num_bytes)}"
        for own in found
        if _has_gpu(own)
        for uuid, process, num_bytes in own["computing"]
        if (own["host"], process) not in own_processes
    }
    least = min(found, key=lambda own: own["free"])
    text = f"at least {size_in_words(least['free'])} free"
    if _has_gpu(least) and least["total"]:
        text += f" of {size_in_words(least['total'])}"
    text += " on each GPU" if _has_gpu(least) else " on each host"
    if strangers and len(strangers) > sum(map(_has_gpu, found)):
        strangers = set(sorted(strangers)[:3])
    if strangers and _lists_our_ranks(found):
        return warning(
            f"{text}; others compute on the same GPUs: {'; '.join(sorted(strangers))}",
            "End what is not needed, or choose other GPUs: CUDA_VISIBLE_DEVICES.",
        )
    if least["free"] < _LEAST:
        return failed(text, "End what uses it, or start fewer ranks on a host.")
    return _used_before(text, found, hosts) or ok(
        text, free=[own["free"] for own in found]
    )


def _used_before(
    text: str, found: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> Found | None:
    """Warn where memory is used by what nvidia-smi does not show here."""
    full = [r for r, own in enumerate(found) if own["used"] > _USED * own["total"]]
    if not full:
        return None
    most = max(own["used"] for own in found)
    return warning(
        f"{text}; up to {size_in_words(most)} was used before the ranks began, on "
        f"{named(full, hosts)}",
        "nvidia-smi shows here no process that has it: look on the host, outside of "
        "the container, or choose other GPUs: CUDA_VISIBLE_DEVICES.",
    )


def cores(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Check that each rank has cores of its own, and as many threads as cores."""
    texts, doubled = [], []
    for host in dict.fromkeys(hosts):
        own = [each for each in found if each["host"] == host]
        used = [core for each in own for core in each["cores"]]
        has_double = len(used) > len(set(used)) and not all(map(_has_gpu, own))
        doubled += [host] * has_double
        counts = sorted({len(each["cores"]) for each in own})
        threads = sorted({each["threads"] for each in own} - {0})
        text = f"cores of a rank: {'/'.join(map(str, counts))}"
        if threads:
            text += f", threads: {'/'.join(map(str, threads))}"
        texts.append(text)
    seen = by_value(
        [texts[list(dict.fromkeys(hosts)).index(host)] for host in hosts], hosts
    )
    seen = texts[0] if len(set(texts)) == 1 else seen
    if doubled:
        return warning(
            f"{seen}; ranks use the same cores",
            "More ranks than cores, KERAS_DIST_BIND=0, or a variable that sets the "
            "threads: fine for a try, slow for a training.",
        )
    return ok(seen, cores=[own["cores"] for own in found])


def matmul(found: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Found:
    """Check that a matrix product ran where it should, with the right numbers."""
    wrong = [rank for rank, own in enumerate(found) if not own["is_right"]]
    if wrong:
        return failed(
            f"a product of two matrices is wrong on {named(wrong, hosts)}",
            "The device or its driver computes wrongly: take that host out.",
        )
    elsewhere = [r for r, own in enumerate(found) if own["kind"] not in own["ran_on"]]
    if elsewhere:
        return failed(
            f"it ran on {found[elsewhere[0]]['ran_on']} on {named(elsewhere, hosts)}",
            "TensorFlow did not use the device: look at its messages, with "
            "KERAS_DIST_VERBOSE=1.",
        )
    speeds = [own["flops"] / 1e9 for own in found]
    seen = f"on {found[0]['ran_on']}, {min(speeds):,.0f} GFLOP/s"
    if max(speeds) > 1.05 * min(speeds):
        seen += f" to {max(speeds):,.0f} GFLOP/s"
    if max(speeds) > 3 * min(speeds):
        slowest = [speeds.index(min(speeds))]
        return warning(
            f"{seen}; the slowest is {named(slowest, hosts)}",
            "All ranks wait for the slowest: look for other processes on it.",
        )
    return ok(seen, gflops=speeds)


def _product() -> dict[str, Any]:
    """Multiply two matrices; find out where, how fast, and whether correctly."""
    generator = np.random.default_rng(0)
    values = generator.integers(-2, 3, size=(2, _SIZE, _SIZE)).astype("float32")
    first, second = tf.constant(values[0]), tf.constant(values[1])
    seconds = []
    for _ in range(1 + _REPEATS):
        begin = time.perf_counter()
        result = tf.matmul(first, second)
        array = result.numpy()
        seconds.append(time.perf_counter() - begin)
    # Small integers: exact in every order, with TF32 too.
    is_right = bool((array[:64] == values[0][:64] @ values[1]).all())
    ran_on = ":".join(result.device.split(":")[-2:])
    return {
        "is_right": is_right,
        "ran_on": ran_on,
        "flops": 2 * _SIZE**3 / min(seconds[1:]),
    }


def _has_gpu(own: Mapping[str, Any]) -> bool:
    return bool(own["kind"] == "GPU")


def _lists_our_ranks(found: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether nvidia-smi lists our ranks; containers have other process ids."""
    return any(own["process"] in [e[1] for e in own["computing"]] for own in found)
