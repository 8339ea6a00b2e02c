"""GPUs and their links in `keras-dist check`, by a program `nvidia-smi` of the test."""

import os

import pytest

from keras_dist.tools.check import devices, gpus
from keras_dist.tools.check.checks import FAILED, OK, UNTRIED, WARNING
from keras_dist.tools.check.collectives import between_gpus

# Index, UUID, name, memory in MiB and how much of it is used, driver; generation,
# lanes at most and lanes in use of PCI Express.
TWO = """\
0, GPU-5a, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, 5, 16, 16
1, GPU-6b, NVIDIA H100 80GB HBM3, 81559, {used}, 550.54.15, 5, 16, {lanes}
"""

# As nvidia-smi prints it: tabs, and the names of the columns underlined.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t{path}\tPIX\t0-51,104-155\t0\t\tN/A
GPU1\t{path}\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""

NVLINK = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-6b)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: 26.562 GB/s
"""

PROGRAM = """#!/bin/sh
case "$1" in
--query-gpu=*) cat {folder}/gpus ;;
--query-compute-apps=*) cat {folder}/processes ;;
topo) cat {folder}/topology ;;
nvlink) cat {folder}/nvlink ;;
*) exit 2 ;;
esac
exit {status}
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an `nvidia-smi` with these answers first on the path."""

    def install(listed=None, *, processes="", path="NV2", status=0, **facts):
        facts = {"used": 4, "lanes": 16, **facts}
        listed = TWO.format(**facts) if listed is None else listed
        (tmp_path / "gpus").write_text(listed)
        (tmp_path / "processes").write_text(processes)
        (tmp_path / "topology").write_text(TOPOLOGY.format(path=path))
        (tmp_path / "nvlink").write_text(NVLINK)
        program = tmp_path / "nvidia-smi"
        program.write_text(PROGRAM.format(folder=tmp_path, status=status))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def rank_on(index, process):
    """What a rank says that computes on a GPU of the listing; no GPU: `None`."""
    listed = gpus.gpus()
    own = [gpu for gpu in listed if gpu.index == index]
    return {
        "host": "localhost",
        "device": f"GPU:{index}" if own else "CPU:0",
        "kind": "GPU" if own else "CPU",
        "num_listed": len(listed),
        "error": "" if listed else gpus.error(),
        "uuid": own[0].uuid if own else "",
        "gpu": own[0].name if own else "",
        "free": own[0].total - own[0].used if own else 2**34,
        "total": own[0].total if own else 0,
        "used": own[0].used if own else 0,
        "process": process,
        "computing": [p for p in gpus.processes() if own and p[0] == own[0].uuid],
    }


def found_by(check, *indices):
    """State, text and cure of a check, for ranks on these GPUs."""
    found = [rank_on(index, 100 + rank) for rank, index in enumerate(indices)]
    state, text, cure, _ = check(found, ["localhost"] * len(found))
    assert bool(cure) == (state in (FAILED, WARNING))
    return state, text


def test_ranks_with_gpus_of_their_own_are_listed_by_uuid(smi):
    """With what is free of their memory, of how much."""
    smi(processes="GPU-5a, 100, 512\nGPU-6b, 101, 512\n")
    state, text = found_by(devices.device, 0, 1)
    assert state == OK
    assert "rank 0: NVIDIA H100 80GB HBM3 GPU-5a; rank 1:" in text
    assert text.endswith("GPU-6b")
    state, text = found_by(devices.memory, 0, 1)
    assert (state, text) == (OK, "at least 79.6 GiB free of 79.6 GiB on each GPU")


def test_a_gpu_that_two_ranks_share_fails_by_its_uuid(smi):
    """Also where each rank has it by another index."""
    smi()
    state, text = found_by(devices.device, 1, 1)
    assert state == FAILED and "GPU-6b: ranks 0, 1" in text


def test_a_gpu_that_is_full_fails(smi):
    """Less than 1 GiB of it is free."""
    smi(used=81000)
    state, text = found_by(devices.memory, 0, 1)
    assert state == FAILED and "at least 559.0 MiB free of 79.6 GiB" in text


def test_a_process_of_somebody_else_is_named(smi):
    """With its GPU, its number and its memory; the ranks are not."""
    ours = "GPU-5a, 100, 512\nGPU-6b, 101, 512\n"
    smi(processes=ours + "GPU-6b, 4711, 30720\n", used=31000)
    state, text = found_by(devices.memory, 0, 1)
    assert state == WARNING
    assert "GPU-6b on localhost: process 4711, 30.0 GiB" in text
    assert "process 100" not in text and "process 101" not in text


def test_memory_that_nobody_here_uses_is_a_warning(smi):
    """In a container nvidia-smi shows no process of others."""
    smi(used=31000)
    state, text = found_by(devices.memory, 0, 1)
    assert state == WARNING
    assert "up to 30.3 GiB was used before the ranks began, on rank 1" in text


def test_nvlink_counts_the_links_between_the_gpus(smi):
    """As many as `topo -m` says, at the rate of `nvlink -s`; inactive ones do not."""
    smi()
    link = gpus.link_of(gpus.gpus())
    assert link.rate == pytest.approx(2 * 26.562e9)
    assert link.words == "NVLink (NV2) has 53.1 GB/s" and not link.fault
    state, text, cure, data = between_gpus(40e9, "40 GB/s", link)
    assert (state, cure) == (OK, "") and text == f"40 GB/s; {link.words}"
    assert data["nominal"] == link.rate
    assert between_gpus(1e9, "1 GB/s", link)[0] == WARNING


def test_pci_express_is_named_with_the_farthest_path(smi):
    """By generation and lanes, where not all pairs have NVLink."""
    smi(path="SYS")
    link = gpus.link_of(gpus.gpus())
    assert link.rate == pytest.approx(63e9, rel=0.01)
    assert link.words == "PCI Express (SYS) has 63 GB/s"
    smi(path="PHB", lanes=4)
    link = gpus.link_of(gpus.gpus())
    assert link.rate == pytest.approx(15.75e9, rel=0.01)
    state, text, cure, _ = between_gpus(10e9, "10 GB/s", link)
    assert state == WARNING and cure
    assert "GPU 1 uses 4 of 16 lanes" in text


def test_one_gpu_has_no_link(smi):
    """Then a sum has no nominal rate."""
    smi()
    link = gpus.link_of(gpus.gpus()[:1])
    state, text, _, _ = between_gpus(1e9, "1 GB/s", link)
    assert state == OK and "which has no nominal rate" in text


def test_without_nvidia_smi_there_is_no_gpu(tmp_path, monkeypatch):
    """It is not tried, and it is no error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.gpus() == [] and gpus.processes() == [] and gpus.error() == ""
    assert gpus.link_of([]) == gpus.Link()
    assert found_by(devices.device, 0, 1)[0] == UNTRIED


@pytest.mark.parametrize(
    ("listed", "status", "words"),
    [
        ("NVIDIA-SMI has failed because it could not reach the driver.\n", 9, "failed"),
        ("No devices were found\n", 0, "No devices were found"),
        ("", 0, "exit code 0, and no output"),
        ("0, GPU-5a\n\n\x00, , ,\n", 0, "0, GPU-5a"),
    ],
)
def test_broken_output_is_a_warning_with_its_words(smi, listed, status, words):
    """And no GPU; a host that has none is not asked to have one."""
    smi(listed, status=status)
    assert gpus.gpus() == []
    state, text = found_by(devices.device, 0, 1)
    assert state == WARNING and words in text
    assert gpus.error().startswith((words, "NVIDIA-SMI has failed"))


def test_numbers_that_nvidia_smi_does_not_know_are_zero(smi):
    """A broken table of links is none: then PCI Express is what there is."""
    smi("0, GPU-5a, A, [N/A], [N/A], 550\n1, GPU-6b, B, 1, 1, 550, [N/A], 16, 16\n")
    first, second = gpus.gpus()
    assert (first.total, first.link, second.link) == (0, 0.0, 0.0)
    assert gpus.link_of([first, second]).rate == 53.124e9  # by NVLink
    smi("0, GPU-5a, A, 1, 1, 550\n1, GPU-6b, B, 1, 1, 550\n", path="N/A")
    assert gpus.link_of(gpus.gpus()) == gpus.Link()
