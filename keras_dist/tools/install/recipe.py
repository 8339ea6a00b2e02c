"""Install Horovod: a wheel that is there, or one that is built now; and verify it."""

import contextlib
import importlib
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_dist.launch import horovod_library
from keras_dist.launch.hosts import num_gpus
from keras_dist.launch.systems import OPEN_MPI, here, this_system
from keras_dist.tools.install import wheels
from keras_dist.tools.install.build import HOROVOD, build_wheel, runtime_requirements
from keras_dist.tools.install.facts import (
    Choice,
    Facts,
    Missing,
    choose,
    detect,
    explain,
    find_missing,
    is_supported,
    missing_python,
)
from keras_dist.tools.install.links import Links
from keras_dist.tools.install.steps import PIP, InstallError, Steps, remedy_for
from keras_dist.tools.install.wheels import Built, is_enough, probe
from keras_dist.version import TENSORFLOW_RANGE

# A folder or an address, the names of its wheels, and what returns the file of a name.
Place = tuple[str, Iterable[str], Callable[[str], Path]]

_REPLACE = (*PIP, "install", "--force-reinstall", "--no-deps")
_REQUIREMENTS = "Installing what Horovod imports"


def install_horovod(
    *,
    mpi: bool | None = None,
    nccl: bool | None = None,
    only_if_needed: bool = False,
    wheel_dir: str | os.PathLike[str] | None = None,
    find_links: str | os.PathLike[str] | None = None,
) -> None:
    """Install Horovod for the TensorFlow of this environment.

    It is built here, or taken without a compiler: from `wheel_dir`, where that was done
    before, or from `find_links`.

    Args:
        mpi: Whether to build with MPI; `None`: if Open MPI is found.
        nccl: Whether to build with NCCL; `None`: if NCCL and nvcc are found.
        only_if_needed: Whether to do nothing if the installed Horovod was built for
            this TensorFlow with our patch, and has MPI and NCCL if they are requested.
        wheel_dir: Folder of wheels. One that fits is installed. If there is none,
            Horovod is built, and its wheel kept there, with those that it imports; by
            default nothing is kept.
        find_links: Folder or address with wheels and their `SHA256SUMS`, which is only
            read. One that fits is installed after its sum was checked; if there is
            none, Horovod is built.

    Raises:
        InstallError: If something is missing, a sum is wrong, or a step of the build
            fails.
    """
    if only_if_needed:
        installed, _ = probe()
        if installed is not None and is_enough(installed, mpi=mpi, nccl=nccl):
            print(installed)
            return
    facts = detect()
    with tempfile.TemporaryDirectory(prefix="keras-dist-") as copies:
        places = _places(wheel_dir, find_links, Path(copies))
        found, unfit = _find(places, facts, mpi=mpi, nccl=nccl)
        if found is not None:
            _require(missing_python(facts))
            take(found, facts)
            how = f"taken from {found.origin}"
    if found is None:
        missing = find_missing(facts, mpi=bool(mpi), nccl=bool(nccl))
        _require(missing, unfit)
        choice = choose(facts, mpi=mpi, nccl=nccl)
        if nccl is None and facts.cuda_home and facts.nccl and not choice.nccl:
            print(
                "NCCL was found, but is not used: it needs the distribution "
                f"`tensorflow`. Received: {facts.distribution}."
            )
        for line in unfit:
            print(f"{line} It is built.")
        build_and_install(facts, choice, wheel_dir)
        how = "built"
    installed = _checked(how)
    print(installed)
    if mpi is None and not installed.mpi:
        print(_what_mpi_brings(facts))
    if found is not None and nccl is None and not installed.nccl and num_gpus():
        print(
            "This machine has GPUs, and this Horovod has no NCCL: gradients go over "
            "the CPUs. keras-dist install-horovod --nccl"
        )


@dataclass(frozen=True)
class Found:
    """A wheel that fits.

    Args:
        path: The file.
        origin: Where it comes from, in words: the file, or its address.
    """

    path: Path
    origin: str


def _find(
    places: Iterable[Place], facts: Facts, *, mpi: bool | None, nccl: bool | None
) -> tuple[Found | None, list[str]]:
    """Return the first wheel that fits, and a sentence for each place without one."""
    unfit = list[str]()
    for place, names, fetch in places:
        path, refused = wheels.find(names, fetch, facts, mpi=mpi, nccl=nccl)
        for name, reason in refused.items():
            print(f"Not taken: {name}\n    {reason}")
        if path is not None:
            return Found(path, f"{place}/{path.name}"), unfit
        count = f", of {len(refused)}," if refused else ""
        unfit.append(f"No wheel of Horovod{count} in {place} fits this environment.")
    return None, unfit


def _places(
    wheel_dir: str | os.PathLike[str] | None,
    find_links: str | os.PathLike[str] | None,
    copies: Path,
) -> Iterator[Place]:
    """Yield where wheels may be; each is read when it is asked for."""
    if wheel_dir is not None:
        kept = Path(wheel_dir)
        names = [path.name for path in kept.glob("horovod-*.whl")]
        yield str(kept), names, kept.joinpath
    if find_links is not None:
        links = Links(os.fspath(find_links), copies)
        yield links.place, links.names, links.fetch


def _require(missing: Sequence[Missing], unfit: Sequence[str] = ()) -> None:
    """Raise if something is missing, with sentences about places without a wheel."""
    if missing:
        raise InstallError("\n".join([*unfit, explain(missing, this_system())]))


def _what_mpi_brings(facts: Facts) -> str:
    packages = "" if facts.has_open_mpi else f"{here(OPEN_MPI)} && "
    return (
        "With MPI, ranks of one machine would share memory, which is faster for large "
        f"gradients: {packages}keras-dist install-horovod --mpi"
    )


def _checked(how: str) -> Built:
    """Import the new Horovod in a new interpreter, and return what it is.

    Args:
        how: How it was made available: "built" or "taken from …".

    Raises:
        InstallError: If it cannot be imported, or has no patch.
    """
    installed, error = probe()
    if installed is None:
        raise InstallError(
            f"Horovod {HOROVOD} was {how} and installed, but cannot be imported:\n"
            f"{error}\n{remedy_for(error)}".rstrip()
        )
    if not installed.is_patched:
        raise InstallError(
            f"Horovod {HOROVOD} was {how} and installed, but keras_dist's patch is not "
            f"in it. Received: {horovod_library.installed_library()}. Perhaps another "
            "Horovod comes first in Python's search path."
        )
    return installed


def build_and_install(
    facts: Facts,
    choice: Choice,
    wheel_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Build a wheel in a temporary folder, install it, and keep it.

    Args:
        facts: What this environment has.
        choice: Transports to build with.
        wheel_dir: See `install_horovod`.
    """
    with (
        _steps() as steps,
        tempfile.TemporaryDirectory(prefix="keras-dist-") as folder,
    ):
        print(f"Building Horovod {HOROVOD} for TensorFlow {facts.tensorflow}.")
        if not is_supported(facts.tensorflow or ""):
            print(
                f"It was tried with TensorFlow {TENSORFLOW_RANGE}: `keras-dist check "
                "-np 2` shows whether it works with this one."
            )
        print(f"The whole output goes to {steps.log}", flush=True)
        wheel = build_wheel(facts, choice, Path(folder), steps)
        requirements = runtime_requirements(facts.python)
        steps.run(_REQUIREMENTS, [*PIP, "install", *requirements])
        steps.run("Installing Horovod", [*_REPLACE, str(wheel)])
        if wheel_dir is not None:
            copy = wheels.keep(wheel, facts, choice, Path(wheel_dir))
            print(f"The wheel is kept: {copy}")
            # The versions of this environment: one of each, which fit each other.
            fetch = [*PIP, "download", "--no-deps", "-d", str(wheel_dir)]
            exact = [_exact(requirement) for requirement in requirements]
            steps.run("Keeping what Horovod imports", [*fetch, *exact])


def take(found: Found, facts: Facts) -> None:
    """Install a wheel that is there, without a network if its folder has the rest."""
    with _steps() as steps:
        print(f"Horovod {HOROVOD} is taken, and not built: {found.origin}", flush=True)
        install = [*PIP, "install"]
        requirements = runtime_requirements(facts.python)
        offline = ["--no-index", "--find-links", str(found.path.parent)]
        if not steps.try_to_run(_REQUIREMENTS, [*install, *offline, *requirements]):
            steps.run(f"{_REQUIREMENTS}, from the index", [*install, *requirements])
        steps.run("Installing Horovod", [*_REPLACE, str(found.path)])


@contextlib.contextmanager
def _steps() -> Iterator[Steps]:
    log_number, log_name = tempfile.mkstemp(prefix="horovod-build-", suffix=".log")
    module = importlib.import_module("keras_dist.tools.screen")  # needs `rich`
    with open(log_number, "w") as log_file, module.Screen() as screen:
        yield Steps(log_file, Path(log_name), screen)


def _exact(requirement: str) -> str:
    """Return a requirement of exactly the installed version of a package."""
    name = re.split(r"\W", requirement)[0]
    return f"{name}=={importlib.metadata.version(name)}"
