"""Install Horovod: a wheel that fits, or one that is built now; and verify it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_dist.tools.install.build import (
    RUNTIME,
    build_wheel,
    digest_patches,
    local_version,
)
from keras_dist.tools.install.facts import (
    HOROVOD,
    Choice,
    Facts,
    choose,
    detect,
    find_missing,
)
from keras_dist.tools.install.steps import PIP, PYTHON, Steps
from keras_dist.version import parse_version

_INSTALL = (*PIP, "install")
_REPLACE = (*_INSTALL, "--force-reinstall", "--no-deps")
_IMPORTS = "Installing what Horovod imports"

# A line for each wheel that is attached to a release of ours: its address, and its hash
# as a fragment, which pip compares. `.github/workflows/wheels.yml` prints them.
_PUBLISHED = Path(__file__).with_name("wheels.txt")

# Run in a new interpreter, with the digest of our patches. The last line of its output
# describes the Horovod that is imported, of which several may be installed.
_PROBE = """
import importlib.metadata, json, pathlib, sys
import horovod, tensorflow
import horovod.tensorflow as hvd
folder = pathlib.Path(horovod.__file__).parent
beside = {"name": "horovod", "path": [str(folder.parent)]}
versions = [each.version for each in importlib.metadata.distributions(**beside)]
print()
print(json.dumps({
    "horovod": horovod.__version__,
    "built_for": json.loads((folder / "metadata.json").read_text()).get("tensorflow"),
    "tensorflow": tensorflow.__version__,
    "mpi": bool(hvd.mpi_built()),
    "nccl": bool(hvd.nccl_built()),
    "cuda": tensorflow.sysconfig.get_build_info().get("cuda_version", ""),
    "is_patched": any(version.endswith(sys.argv[1]) for version in versions),
    "folder": str(folder),
}))
"""

_PATCHED = "It has keras_dist's patches."
_NOT_PATCHED = (
    "Its version does not name the patches of this keras_dist. Without them, on "
    "several hosts it takes the network of each host's own name, and sums on CPUs take "
    "longer. Run: keras-dist install-horovod"
)


@dataclass(frozen=True)
class Built:
    """An installed Horovod.

    Args:
        horovod: Version of Horovod.
        built_for: Version of TensorFlow that it was built for.
        tensorflow: Version of TensorFlow that is installed.
        mpi: Whether it was built with MPI.
        nccl: Whether it was built with NCCL.
        cuda: Version of CUDA that TensorFlow was built for; empty for CPUs alone.
        is_patched: Whether it has keras_dist's patches, as its version says.
        folder: The folder that is imported.
    """

    horovod: str
    built_for: str | None
    tensorflow: str
    mpi: bool
    nccl: bool
    cuda: str = ""
    is_patched: bool = False
    folder: str = ""

    def __str__(self) -> str:
        transports = "Gloo" + ", MPI" * self.mpi + ", NCCL" * self.nccl
        return (
            f"Horovod {self.horovod} is built for TensorFlow {self.built_for}, with "
            f"{transports}.\n{_PATCHED if self.is_patched else _NOT_PATCHED}"
        )


def is_enough(installed: Built, *, mpi: bool | None, nccl: bool | None) -> bool:
    """Return True if an installed Horovod need not be built again for a request."""
    built_for = parse_version(installed.built_for or "")
    fits = built_for == parse_version(installed.tensorflow)
    fits = fits and installed.horovod == HOROVOD and installed.is_patched
    return fits and installed.mpi >= bool(mpi) and installed.nccl >= bool(nccl)


def probe() -> tuple[Built | None, str]:
    """Import Horovod in a new interpreter.

    Returns:
        The installed Horovod, or `None` and the end of the error message.
    """
    result = subprocess.run(
        [*PYTHON, "-c", _PROBE, digest_patches()],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        return None, "\n".join(result.stderr.splitlines()[-5:])
    return Built(**json.loads(result.stdout.splitlines()[-1])), ""


def install_horovod(
    *,
    mpi: bool | None = None,
    nccl: bool | None = None,
    only_if_needed: bool = False,
    wheel_dir: str | os.PathLike[str] | None = None,
    find_links: str | os.PathLike[str] | None = None,
) -> None:
    """Install Horovod for the TensorFlow of this environment.

    Args:
        mpi: Whether to have MPI; `None`: if Open MPI is found.
        nccl: Whether to have NCCL; `None`: if NCCL and nvcc are found.
        only_if_needed: Whether to do nothing if the installed Horovod was built for
            this TensorFlow with our patches, and has MPI and NCCL if they are
            requested.
        wheel_dir: Folder of wheels. One that fits is installed. If there is none,
            Horovod is built, and its wheel kept there, with those that it imports; by
            default nothing is kept.
        find_links: As pip's `--find-links`: a folder, or the address of a page of
            links. A wheel that fits is installed; if there is none, Horovod is built.

    Raises:
        RuntimeError: If something is missing, or a step fails.
    """
    if only_if_needed:
        installed, _ = probe()
        if installed is not None and is_enough(installed, mpi=mpi, nccl=nccl):
            print(installed)
            return
    facts, steps = detect(), Steps()
    places = [os.fspath(place) for place in (wheel_dir, find_links) if place]
    choices = [choose(facts, mpi=mpi, nccl=nccl, is_build=False)]
    if places:  # of a user who may have built less than would work here
        choices.append(Choice(mpi=bool(mpi), nccl=bool(nccl)))
    how = take(places, facts, steps, choices)
    if not how:
        if places:
            print(f"No wheel of Horovod in {' or '.join(places)} fits: it is built.")
        if missing := find_missing(facts, mpi=bool(mpi), nccl=bool(nccl)):
            lines = ["Horovod cannot be installed here. Missing:", *missing]
            raise RuntimeError("\n  - ".join(lines))
        choice = choose(facts, mpi=mpi, nccl=nccl)
        build_and_install(facts, choice, steps, wheel_dir)
        how = "built"
    installed, error = probe()
    if installed is None or not installed.is_patched:
        error = f"cannot be imported:\n{error}"
        if installed is not None:
            error = (
                "another one, without keras_dist's patches, is imported: "
                f"{installed.folder}. Perhaps it comes first in Python's search path."
            )
        raise RuntimeError(f"Horovod {HOROVOD} was {how} and installed, but {error}")
    print(installed)


def take(
    places: Sequence[str], facts: Facts, steps: Steps, choices: Sequence[Choice]
) -> str:
    """Install a wheel that fits, by the first choice of which there is one.

    Without `places` it is a published one. pip knows which wheels are for this Python,
    processor and C library. The version of ours also has TensorFlow, transports and
    patches.

    Returns:
        What was taken, in words; empty if no wheel fits.
    """
    links = [word for place in places for word in ("--find-links", place)]
    if places:
        links += ["--no-index", "--only-binary", ":all:"]  # nothing else, no source
    for choice in dict.fromkeys(choices):
        wheel = f"horovod=={HOROVOD}+{local_version(facts.tensorflow, choice)}"
        words = [*links, wheel] if places else find_published(wheel)
        if words and steps.try_to_run(f"Looking for {wheel}", [*_REPLACE, *words]):
            imports = [*_INSTALL, *RUNTIME]
            if not steps.try_to_run(_IMPORTS, [*imports, *links]):
                steps.run(f"{_IMPORTS}, from the index", imports)
            return f"taken as {wheel}"
    return ""


def find_published(wheel: str) -> list[str]:
    """Return the address of a published wheel for this Python, if there is one."""
    name = wheel.replace("==", "-").replace("+", "%2B")
    name += f"-cp{sys.version_info[0]}{sys.version_info[1]}-"
    return [line for line in _PUBLISHED.read_text().splitlines() if name in line][:1]


def build_and_install(
    facts: Facts,
    choice: Choice,
    steps: Steps,
    wheel_dir: str | os.PathLike[str] | None,
) -> None:
    """Build a wheel in a temporary folder, install it, and keep it in `wheel_dir`."""
    print(f"Building Horovod {HOROVOD} for TensorFlow {facts.tensorflow}.")
    print(f"The whole output goes to {steps.log}", flush=True)
    with tempfile.TemporaryDirectory(prefix="keras-dist-") as folder:
        steps.run(_IMPORTS, [*_INSTALL, *RUNTIME])  # first: pip may refuse it
        wheel = build_wheel(facts, choice, Path(folder), steps)
        steps.run("Installing Horovod", [*_REPLACE, str(wheel)])
        if wheel_dir is not None:
            fetch = [*PIP, "download", "--no-deps", "-d", str(wheel_dir)]
            steps.run(f"Keeping it in {wheel_dir}", [*fetch, str(wheel), *RUNTIME])
