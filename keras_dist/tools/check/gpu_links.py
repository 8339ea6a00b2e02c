"""What links the GPUs of one host, as nvidia-smi has it: NVLink or PCI Express."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_dist.tools.check.gpus import Gpu, answer

# Of a row of `topo -m`, by which GPUs and network cards are named, maybe underlined.
_COLUMN, _GPU, _UNDERLINED = r"(GPU|NIC)\d+|mlx\w+", r"GPU\d+", r"\x1b\[\d*m"
_GPU_OF_LINKS = r"GPU \d+:.*\(UUID: ([^)]+)\)"
_NVLINKS = r"NV\d+"
_RATE_OF_LINK = r"\s*Link \d+: ([\d.]+) GB/s"

# Paths of `topo -m` by which NVLink is not taken, from the nearest to the farthest.
_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")


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


def link_of(own: Sequence[Gpu]) -> Link:
    """What links these GPUs, at its nominal rate.

    Args:
        own: The GPUs of the ranks.
    """
    if len(own) < 2:
        return Link()
    paths = paths_in(answer("topo", "-m"))
    between = [
        paths.get((f"GPU{one.index}", f"GPU{other.index}"), "")
        for one, other in itertools.permutations(own, 2)
    ]
    if all(re.fullmatch(_NVLINKS, path) for path in between):
        found = _nvlink(own, between, rates_in(answer("nvlink", "-s")))
        if found.rate:
            return found
    return _pci_express(own, between)


def _nvlink(
    own: Sequence[Gpu], between: Sequence[str], rates: Mapping[str, Sequence[float]]
) -> Link:
    """Each GPU sends by its links to the others, as many as it has."""
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
    """The path between each pair of GPUs, of a listing of `nvidia-smi topo -m`.

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
    """Bytes per second of each NVLink by UUID, of a listing of `nvidia-smi nvlink -s`.

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
