"""The GPUs of this host, as nvidia-smi lists them, and which of them a rank uses."""

import ctypes
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SMI = "nvidia-smi"
_SECONDS = 20.0
_FORMAT = ("--format=csv,noheader,nounits",)
_LONGEST = 200
_FIELDS = (
    *("index", "uuid", "name", "memory.total", "memory.used", "driver_version"),
    *("pcie.link.gen.max", "pcie.link.width.max", "pcie.link.width.current"),
)
_MIB = 2**20

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


def gpus() -> list[Gpu]:
    """All GPUs that nvidia-smi lists; none where there is no nvidia-smi."""
    return gpus_in(_asked(f"--query-gpu={','.join(_FIELDS)}"))


def error() -> str:
    """Why nvidia-smi lists no GPU, in its own words; empty where there is none."""
    status, text = _run(f"--query-gpu={','.join(_FIELDS)}", *_FORMAT)
    if status is None or gpus_in(text):
        return ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first[:_LONGEST] or f"exit code {status}, and no output"


def gpus_in(listing: str) -> list[Gpu]:
    """The GPUs of a listing of nvidia-smi.

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
    """UUID of the GPU, process id and bytes of each process that computes on one."""
    found = []
    for line in _asked("--query-compute-apps=gpu_uuid,pid,used_memory").splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and words[1].isdecimal():
            found.append((words[0], int(words[1]), _number(words, 2) * _MIB))
    return found


def uuid_of_rank(listed: Sequence[Gpu], *, index: int, has_gpu: bool) -> str:
    """UUID of the GPU that this process uses; empty if it cannot be found.

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
    """UUID of a GPU by its number for CUDA in this process; empty without CUDA."""
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
    """The GPUs that CUDA shows to a process, in its order.

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


def answer(*words: str) -> str:
    """What nvidia-smi says; empty if there is none, or if it fails."""
    status, text = _run(*words)
    return text if status == 0 else ""


def _asked(query: str) -> str:
    return answer(query, *_FORMAT)


def _run(*words: str) -> tuple[int | None, str]:
    """Exit code of nvidia-smi, `None` where there is none, and what it prints."""
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
