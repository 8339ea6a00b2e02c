"""Wheels of Horovod that were built once, and are taken on other hosts and in images.

The name of such a wheel says for what it was built, in what the format of wheels calls
the build number: the version of TensorFlow, the transports, the oldest C library that
it runs with, and eight digits for our patches. Python, its ABI and the processor stand
in each wheel's name:

    horovod-0.28.1-1_tf2.21.0_gloo_mpi_glibc2.34_5f0c2a91-cp311-cp311-linux_x86_64.whl
"""

import ctypes
import os
import re
import secrets
import shutil
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keras_dist.tools.install import patch
from keras_dist.tools.install.facts import Facts
from keras_dist.tools.install.flags import CXX_FLAG, HOROVOD, Choice
from keras_dist.tools.install.requirements import OPEN_MPI

_NAME = re.compile(
    r"horovod-(?P<horovod>[^-]+)-1_tf(?P<tensorflow>[^_-]+)_(?P<transports>gloo\w*?)"
    r"_glibc(?P<glibc>\d+\.\d+)_(?P<patches>[0-9a-f]{8})"
    r"-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl"
)

# Texts in a library: versions of the C library's functions, and libraries of transports
# that the linker has noted.
_GLIBC = re.compile(rb"\0GLIBC_(\d+)\.(\d+)")
_LIBRARY = re.compile(rb"\0(lib(?:mpi|nccl)\w*\.so\.\d+)(?=\0)")


@dataclass(frozen=True)
class Wheel:
    """For what a wheel was built, as its name says.

    Args:
        horovod: Version of Horovod.
        tensorflow: Version of TensorFlow.
        transports: "gloo", with "_mpi", "_nccl" or both behind it.
        glibc: Version of the oldest C library that it runs with.
        patches: Digits for our changes; see `patch.fingerprint`.
        python: Tag of the Python, such as "cp311".
        abi: Tag of the ABI of the Python.
        platform: Tag of system and processor, such as "linux_x86_64".
    """

    horovod: str
    tensorflow: str
    transports: str
    glibc: str
    patches: str
    python: str
    abi: str
    platform: str

    @property
    def name(self) -> str:
        """The name of the wheel's file."""
        build = f"1_tf{self.tensorflow}_{self.transports}_glibc{self.glibc}"
        tags = f"{self.python}-{self.abi}-{self.platform}"
        return f"horovod-{self.horovod}-{build}_{self.patches}-{tags}.whl"

    @property
    def mpi(self) -> bool:
        """Whether it has MPI."""
        return "_mpi" in self.transports

    @property
    def nccl(self) -> bool:
        """Whether it has NCCL."""
        return "_nccl" in self.transports


def wheel_of(name: str) -> Wheel | None:
    """For what a wheel was built; `None` if the name does not say it.

    >>> name = "1_tf2.21.0_gloo_mpi_glibc2.34_5f0c2a91-cp311-cp311-linux_x86_64.whl"
    >>> wheel_of(f"horovod-0.28.1-{name}").transports
    'gloo_mpi'
    >>> wheel_of("horovod-0.28.1-cp311-cp311-linux_x86_64.whl")
    """
    match = _NAME.fullmatch(name)
    return Wheel(**match.groupdict()) if match else None


def keep(built: Path, facts: Facts, choice: Choice, folder: Path) -> Path:
    """Copy a wheel that was just built to a folder, and name it.

    Args:
        built: The wheel, as pip has named it.
        facts: The environment for which it was built.
        choice: What it was built with.
        folder: The folder, which is made if there is none. Other hosts may read it
            meanwhile: the wheel is there whole, or not.

    Returns:
        The path of the copy.
    """
    python, abi, platform = built.stem.split("-")[-3:]
    wheel = Wheel(
        horovod=HOROVOD,
        tensorflow=str(facts.tensorflow),
        transports="gloo" + "_mpi" * choice.mpi + "_nccl" * choice.nccl,
        glibc=".".join(map(str, _oldest_glibc(built))),
        patches=fingerprint(),
        python=python,
        abi=abi,
        platform=platform,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel.name
    draft = folder / f".{wheel.name}.{secrets.token_hex(4)}"
    shutil.copyfile(built, draft)
    os.replace(draft, path)
    return path


def fingerprint() -> str:
    """Digits for our changes to Horovod's source, and what of it is not compiled."""
    return patch.fingerprint(CXX_FLAG)


def find(
    folder: Path, facts: Facts, *, mpi: bool | None, nccl: bool | None
) -> tuple[Path | None, dict[str, str]]:
    """The wheel of a folder that fits this environment.

    Args:
        folder: The folder; there may be none.
        facts: What this environment has.
        mpi: Whether MPI is requested; `None` for either.
        nccl: Whether NCCL is requested; `None` for either.

    Returns:
        The wheel, of several that with most transports, or `None`; and for each wheel
        of Horovod that does not fit a sentence that says why.
    """
    fitting, refused = [], {}
    for path in sorted(folder.glob("horovod-*.whl")):
        wheel = wheel_of(path.name)
        reason = (
            "Its name does not say for what it was built: it was not kept by "
            "`install-horovod --wheel-dir` of this version of keras_dist."
            if wheel is None
            else next(_misfits(wheel, path, facts, mpi=mpi, nccl=nccl), "")
        )
        if reason:
            refused[path.name] = reason
        elif wheel is not None:
            fitting.append((wheel.nccl + wheel.mpi, path))
    return max(fitting)[1] if fitting else None, refused


def _misfits(
    wheel: Wheel, path: Path, facts: Facts, *, mpi: bool | None, nccl: bool | None
) -> Iterator[str]:
    """Sentences that say why a wheel does not fit; none if it does."""
    if wheel.horovod != HOROVOD:
        yield f"It is Horovod {wheel.horovod}, and {HOROVOD} is needed."
    if wheel.tensorflow != facts.tensorflow:
        yield (
            f"It was built for TensorFlow {wheel.tensorflow}, and here is "
            f"{facts.tensorflow or 'none'}."
        )
    python = f"cp{facts.python[0]}{facts.python[1]}"
    tags = (wheel.python, wheel.abi, wheel.platform)
    if tags != (python, python, facts.platform):
        yield (
            f"It was built for {' '.join(tags)}, and this Python is "
            f"{python} {facts.platform}."
        )
    if _numbers(wheel.glibc) > facts.glibc:
        yield (
            f"It needs glibc {wheel.glibc}, and here is "
            f"{'.'.join(map(str, facts.glibc))}: build it on the oldest system."
        )
    if wheel.patches != fingerprint():
        yield "It was built with other patches, by another version of keras_dist."
    for name, has, asked in (("MPI", wheel.mpi, mpi), ("NCCL", wheel.nccl, nccl)):
        if asked is not None and asked != has:
            option = f"--{'no-' * has}{name.lower()}"
            yield f"It has {'' if has else 'no '}{name}, and {option} was given."
    yield from _unloadable(wheel, path, facts)


def _unloadable(wheel: Wheel, path: Path, facts: Facts) -> Iterator[str]:
    """Sentences about libraries of its transports that are missing here."""
    if wheel.nccl and facts.distribution != "tensorflow":
        yield (
            "It has NCCL, which needs the distribution `tensorflow`, and here is "
            f"`{facts.distribution}`."
        )
    for library in needed_libraries(path) if wheel.mpi or wheel.nccl else []:
        if not is_loadable(library):
            advice = "pip install nvidia-nccl-cu12" if "nccl" in library else OPEN_MPI
            yield f"It needs {library}, which is not found here: {advice}"


def needed_libraries(path: Path) -> list[str]:
    """Libraries of MPI and NCCL that the library in a wheel was linked to."""
    names = {name.decode() for name in _LIBRARY.findall(_library_in(path))}
    return sorted(names)


def is_loadable(library: str) -> bool:
    """Whether a library is found when Horovod is imported."""
    wheels = Path(sysconfig.get_path("platlib"), "nvidia", "nccl", "lib")
    if (wheels / library).is_file():
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _oldest_glibc(path: Path) -> tuple[int, int]:
    versions = _GLIBC.findall(_library_in(path))
    return max(((int(a), int(b)) for a, b in versions), default=(2, 17))


def _library_in(path: Path) -> bytes:
    """Horovod's library for TensorFlow in a wheel; empty if there is none."""
    with zipfile.ZipFile(path) as files:
        for name in files.namelist():
            if name.startswith("horovod/tensorflow/mpi_lib"):
                return files.read(name)
    return b""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))
