"""The GPUs of this host, from nvidia-smi: which a rank uses, and what links them."""

import ctypes
import itertools
import os
import re
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SMI = "nvidia-smi"
_SECONDS = 20.0
_FORMAT = "--format=csv,noheader,nounits"
_LONGEST = 200
_GPUS = (
    "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version,"
    "pcie.link.gen.max,pcie.link.width.max,pcie.link.width.current"
)
_PROCESSES = "--query-compute-apps=gpu_uuid,pid,used_memory"
_MIB = 2**20

# Of a row of `topo -m`, by which GPUs and network cards are named, maybe underlined.
_COLUMN, _GPU, _UNDERLINED = r"(GPU|NIC)\d+|mlx\w+", r"GPU\d+", r"\x1b\[\d*m"
_GPU_OF_LINKS = r"GPU \d+:.*\(UUID: ([^)]+)\)"
_NVLINKS = r"NV\d+"
_RATE_OF_LINK = r"\s*Link \d+: ([\d.]+) GB/s"

# Paths of `topo -m` by which NVLink is not taken, from the nearest to the farthest.
_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")

# Bytes per second of one lane of PCI Express, by generation.
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host.

    Args:
        index: Its number in nvidia-smi's listing.
        uuid: Its UUID, which no other GPU has.
        name: Its model.
        total: Bytes of its memory.
        used: Bytes of it that are in use.
        driver: Version of the driver.
        link: Bytes per second of its PCI Express link with the lanes that it uses; 0 if
            it is not known.
        lanes: Lanes of that link; 0 if they are not known.
        most_lanes: Lanes that the GPU and its host have.
    """

    index: int
    uuid: str
    name: str
    total: int
    used: int
    driver: str = ""
    link: float = 0.0
    lanes: int = 0
    most_lanes: int = 0


@dataclass(frozen=True)
class Link:
    """What links some GPUs of one host.

    Args:
        rate: Bytes per second in one direction; 0 if it is not known.
        words: The same in words.
        fault: What is wrong with it, in words; empty if nothing is.
    """

    rate: float = 0.0
    words: str = ""
    fault: str = ""


def gpus() -> list[Gpu]:
    """List the GPUs of this host; none where there is no nvidia-smi."""
    return gpus_in(_answer(_GPUS, _FORMAT))


def error() -> str:
    """Say why nvidia-smi lists no GPU, in its words; empty where there is none."""
    status, text = _run(_GPUS, _FORMAT)
    if status is None or gpus_in(text):
        return ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first[:_LONGEST] or f"exit code {status}, and no output"


def gpus_in(listing: str) -> list[Gpu]:
    """Parse a listing of nvidia-smi.

    >>> gpus_in("0, GPU-1b, NVIDIA H100, 81559, 1024, 550.54, 5, 16")[0].used // 2**20
    1024
    >>> gpus_in("No devices were found")
    []
    """
    found = []
    for line in listing.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) < 6 or not words[0].isdecimal():
            continue
        most = _number(words, 7)
        lanes = _number(words, 8) or most
        link = lanes * _LANE.get(_number(words, 6), 0.0)
        total, used = _number(words, 3) * _MIB, _number(words, 4) * _MIB
        index, driver = int(words[0]), words[5]
        facts = (index, words[1], words[2], total, used, driver, link, lanes, most)
        found.append(Gpu(*facts))
    return found


def processes() -> list[tuple[str, int, int]]:
    """List GPU UUID, process id and bytes of each process that computes on a GPU."""
    found = []
    for line in _answer(_PROCESSES, _FORMAT).splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and words[1].isdecimal():
            found.append((words[0], int(words[1]), _number(words, 2) * _MIB))
    return found


def uuid_of_rank(listed: Sequence[Gpu], *, index: int, has_gpu: bool) -> str:
    """Find the UUID of the GPU that this process uses; empty if it is unknown.

    Args:
        listed: All GPUs of the host.
        index: Number of the GPU among those that this process may use.
        has_gpu: Whether this process computes on a GPU, and not on a CPU.
    """
    found = uuid_by_driver(index) if has_gpu else ""
    if found:
        return found
    own = [uuid for uuid, process, _ in processes() if process == os.getpid()]
    if own:
        return own[0]
    usable = visible(listed, os.environ)
    return usable[index % len(usable)].uuid if usable else ""


def uuid_by_driver(index: int) -> str:
    """Find the UUID of a GPU by its CUDA number in this process; "" without CUDA."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    # The second one knows slices of a GPU (MIG), too.
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    calls = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), index),
        lambda: ask(ctypes.byref(found), device),
    )
    if any(call() for call in calls):  # in this order, up to the first error
        return ""
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"


def visible(listed: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA shows to a process, in CUDA's order.

    >>> two = [Gpu(0, "GPU-a", "", 0, 0), Gpu(1, "GPU-b", "", 0, 0)]
    >>> [gpu.uuid for gpu in visible(two, {"CUDA_VISIBLE_DEVICES": "1,GPU-a"})]
    ['GPU-b', 'GPU-a']
    """
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return list(listed)
    found = []
    for name in environ["CUDA_VISIBLE_DEVICES"].split(","):
        is_named = [
            str(gpu.index) == name.strip()
            or (name.strip() and gpu.uuid.startswith(name.strip()))
            for gpu in listed
        ]
        if True not in is_named:  # CUDA shows no GPU after one that it does not know
            break
        found.append(listed[is_named.index(True)])
    return found


def _answer(*words: str) -> str:
    """Return the output of nvidia-smi; empty if there is none, or if it fails."""
    status, text = _run(*words)
    return text if status == 0 else ""


def _run(*words: str) -> tuple[int | None, str]:
    """Return the exit code of nvidia-smi, `None` without it, and its output."""
    try:
        done = subprocess.run(
            [_SMI, *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {_SECONDS:.0f} s"
    except OSError:
        return None, ""
    return done.returncode, done.stdout or done.stderr


def _number(words: Sequence[str], index: int) -> int:
    text = words[index] if index < len(words) else ""
    return int(float(text)) if text.replace(".", "", 1).isdecimal() else 0


def link_of(own: Sequence[Gpu]) -> Link:
    """Find what links the GPUs of the ranks, with its nominal rate."""
    if len(own) < 2:
        return Link()
    paths = paths_in(_answer("topo", "-m"))
    between = [
        paths.get((f"GPU{one.index}", f"GPU{other.index}"), "")
        for one, other in itertools.permutations(own, 2)
    ]
    if all(re.fullmatch(_NVLINKS, path) for path in between):
        found = _nvlink(own, between, rates_in(_answer("nvlink", "-s")))
        if found.rate:
            return found
    return _pci_express(own, between)


def _nvlink(
    own: Sequence[Gpu], between: Sequence[str], rates: Mapping[str, Sequence[float]]
) -> Link:
    """Add up the links by which each GPU sends to the others."""
    each = len(own) - 1
    most = []
    for number, gpu in enumerate(own):
        counts = [int(path[2:]) for path in between[number * each :][:each]]
        fastest = sorted(rates.get(gpu.uuid, ()), reverse=True)
        most.append(sum(fastest[: sum(counts)]))
    names = "/".join(sorted(set(between)))
    rate = min(most)
    return Link(rate, f"NVLink ({names}) has {rate / 1e9:.3g} GB/s")


def _pci_express(own: Sequence[Gpu], between: Sequence[str]) -> Link:
    slowest = min(own, key=lambda gpu: gpu.link)
    if not slowest.link:
        return Link()
    known = [path for path in between if path in _PATHS]
    farthest = f" ({max(known, key=_PATHS.index)})" if known else ""
    words = f"PCI Express{farthest} has {slowest.link / 1e9:.3g} GB/s"
    faults = [
        f"GPU {gpu.index} uses {gpu.lanes} of {gpu.most_lanes} lanes"
        for gpu in own
        if 0 < gpu.lanes < gpu.most_lanes
    ]
    return Link(slowest.link, words, "; ".join(faults))


def paths_in(listing: str) -> dict[tuple[str, str], str]:
    """Return the path between each pair of GPUs, from `nvidia-smi topo -m`.

    >>> paths_in(" GPU0 GPU1 NIC0\\nGPU0 X NV4 PIX\\nGPU1 NV4 X SYS")
    {('GPU0', 'GPU1'): 'NV4', ('GPU1', 'GPU0'): 'NV4'}
    >>> paths_in("No devices were found")
    {}
    """
    rows = [re.sub(_UNDERLINED, "", line).split() for line in listing.splitlines()]
    columns = list(
        itertools.takewhile(
            lambda word: re.fullmatch(_COLUMN, word), next(iter(rows), [])
        )
    )
    return {
        (row[0], column): path
        for row in rows[1:]
        if row and re.fullmatch(_GPU, row[0])
        for column, path in zip(columns, row[1:], strict=False)
        if re.fullmatch(_GPU, column) and path != "X"
    }


def rates_in(listing: str) -> dict[str, list[float]]:
    """Return bytes per second of each NVLink by UUID, from `nvidia-smi nvlink -s`.

    >>> rates_in("GPU 0: V100 (UUID: GPU-a)\\n Link 0: 25.5 GB/s\\n Link 1: <inactive>")
    {'GPU-a': [25500000000.0]}
    """
    found: dict[str, list[float]] = {}
    uuid = ""
    for line in listing.splitlines():
        if gpu := re.match(_GPU_OF_LINKS, line):
            uuid = gpu[1]
        elif rate := re.match(_RATE_OF_LINK, line):
            found.setdefault(uuid, []).append(float(rate[1]) * 1e9)
    return found
