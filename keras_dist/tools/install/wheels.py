"""The installed Horovod, and wheels that were built once for several hosts and images.

The name of such a wheel says for what it was built. The local version names
TensorFlow. The build number has the transports, the oldest C library that it runs with,
and eight digits for our patches. Python, its ABI and the processor are in each wheel's
name:

    horovod-0.28.1+keras.dist.tf2.21-1_gloo_mpi_glibc2.34_5f0c2a91-cp311-cp311-linux_x86_64.whl
"""

import ctypes
import json
import os
import re
import secrets
import shutil
import subprocess
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from keras_dist.launch import horovod_library
from keras_dist.launch.systems import OPEN_MPI, here
from keras_dist.tools.install.build import HOROVOD, fingerprint, local_version
from keras_dist.tools.install.facts import Choice, Facts, minor_of
from keras_dist.tools.install.steps import PYTHON

# Run in a new interpreter. Its last line of output describes the installed Horovod.
_PROBE = """
import json, pathlib
import horovod, tensorflow
import horovod.tensorflow as hvd
metadata = pathlib.Path(horovod.__file__).with_name("metadata.json")
print()
print(json.dumps({
    "horovod": horovod.__version__,
    "built_for": json.loads(metadata.read_text()).get("tensorflow"),
    "tensorflow": tensorflow.__version__,
    "gloo": bool(hvd.gloo_built()),
    "mpi": bool(hvd.mpi_built()),
    "nccl": bool(hvd.nccl_built()),
    "cuda": tensorflow.sysconfig.get_build_info().get("cuda_version", ""),
}))
"""

_PATCHED = (
    "It has keras_dist's patches: between hosts everything goes over the network that "
    "is named, whatever a host's own name resolves to; a collective begins as soon as "
    "the ranks have its tensor; and on CPUs its result takes the place of the tensor, "
    "and ranks of one host exchange large tensors without sockets."
)
_NOT_PATCHED = (
    "It was built elsewhere, without keras_dist's patches: on several hosts each "
    "host's own name has to resolve there to the address by which the others reach it, "
    "and collectives on CPUs take longer. `keras-dist install-horovod` builds it with "
    "them."
)

_NAME = re.compile(
    r"horovod-(?P<horovod>[^-+]+)\+keras\.dist\.tf(?P<tensorflow>[^-]+)"
    r"-1_(?P<transports>gloo\w*?)_glibc(?P<glibc>\d+\.\d+)_(?P<patches>[0-9a-f]{8})"
    r"-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl"
)

# A platform of which a wheel's tag names the oldest C library (PEP 600).
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")

# Texts in a library: versions of the C library's functions, and libraries of transports
# that the linker has noted.
_GLIBC = re.compile(rb"\0GLIBC_(\d+)\.(\d+)")
_LIBRARY = re.compile(rb"\0(lib(?:mpi|nccl)\w*\.so\.\d+)(?=\0)")


@dataclass(frozen=True)
class Wheel:
    """The name of a wheel, which says for what it was built.

    Args:
        horovod: Version of Horovod.
        tensorflow: Version of TensorFlow, without its patch release.
        transports: "gloo", with "_mpi", "_nccl" or both behind it.
        glibc: Version of the oldest C library that it runs with.
        patches: Digits for our changes; see `build.fingerprint`.
        python: Tag of the Python, such as "cp311".
        abi: Tag of the ABI of the Python.
        platform: Tag of system and processor, such as "linux_x86_64" or
            "manylinux_2_34_x86_64"; there may be several, with dots between them.
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
        """Name of the file."""
        version = f"{self.horovod}+{local_version(self.tensorflow)}"
        build = f"1_{self.transports}_glibc{self.glibc}_{self.patches}"
        return f"horovod-{version}-{build}-{self.python}-{self.abi}-{self.platform}.whl"

    @property
    def mpi(self) -> bool:
        """True if the wheel has MPI."""
        return "_mpi" in self.transports

    @property
    def nccl(self) -> bool:
        """True if the wheel has NCCL."""
        return "_nccl" in self.transports


def wheel_of(name: str) -> Wheel | None:
    """Parse the name of a wheel; `None` if it does not say for what it was built.

    >>> version = "0.28.1+keras.dist.tf2.21"
    >>> name = "1_gloo_mpi_glibc2.34_5f0c2a91-cp311-cp311-linux_x86_64.whl"
    >>> wheel_of(f"horovod-{version}-{name}").transports
    'gloo_mpi'
    >>> wheel_of("horovod-0.28.1-cp311-cp311-linux_x86_64.whl")
    """
    match = _NAME.fullmatch(name)
    return Wheel(**match.groupdict()) if match else None


def keep(built: Path, facts: Facts, choice: Choice, folder: Path) -> Path:
    """Copy a new wheel to a folder, and name it.

    Args:
        built: The wheel, as pip has named it.
        facts: The environment for which it was built.
        choice: Transports with which it was built.
        folder: The folder, created if necessary. Other hosts may read it meanwhile:
            the wheel appears atomically.

    Returns:
        The path of the copy.
    """
    python, abi, platform = built.stem.split("-")[-3:]
    wheel = Wheel(
        horovod=HOROVOD,
        tensorflow=minor_of(facts.tensorflow),
        transports="gloo" + "_mpi" * choice.mpi + "_nccl" * choice.nccl,
        glibc=_text(_oldest_glibc(built)),
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


def find(
    names: Iterable[str],
    fetch: Callable[[str], Path],
    facts: Facts,
    *,
    mpi: bool | None,
    nccl: bool | None,
) -> tuple[Path | None, dict[str, str]]:
    """Find the wheel that fits this environment.

    Args:
        names: Names of the wheels to choose from.
        fetch: Returns the path of a wheel. Called with the name of one that fits, as
            far as names say, and after that only if its libraries are missing.
        facts: What this environment has.
        mpi: Whether MPI is requested; `None` for either.
        nccl: Whether NCCL is requested; `None` for either.

    Returns:
        The wheel with the most transports, or `None`; and for each wheel of Horovod
        that does not fit a sentence that says why.
    """
    fitting, refused = list[tuple[int, str, Wheel]](), dict[str, str]()
    for name in sorted(names):
        wheel = wheel_of(name)
        reason = (
            "Its name does not say for what it was built: it was not kept by "
            "`install-horovod --wheel-dir` of this version of keras_dist."
            if wheel is None
            else next(_misfits(wheel, facts, mpi=mpi, nccl=nccl), "")
        )
        if reason:
            refused[name] = reason
        elif wheel is not None:
            fitting.append((wheel.nccl + wheel.mpi, name, wheel))
    for _, name, wheel in sorted(fitting, key=lambda item: item[:2], reverse=True):
        path = fetch(name)
        refused[name] = next(_unloadable(wheel, path, facts), "")
        if not refused[name]:
            del refused[name]
            return path, refused
    return None, refused


def _misfits(
    wheel: Wheel, facts: Facts, *, mpi: bool | None, nccl: bool | None
) -> Iterator[str]:
    """Yield what a wheel's name says against it, in sentences; nothing if it fits."""
    if wheel.horovod != HOROVOD:
        yield f"It is Horovod {wheel.horovod}, and {HOROVOD} is needed."
    if wheel.tensorflow != minor_of(facts.tensorflow):
        yield (
            f"It was built for TensorFlow {wheel.tensorflow}, and here is "
            f"{facts.tensorflow or 'none'}."
        )
    python = f"cp{facts.python[0]}{facts.python[1]}"
    is_platform = any(_is_platform(tag, facts) for tag in wheel.platform.split("."))
    if (wheel.python, wheel.abi) != (python, python) or not is_platform:
        yield (
            f"It was built for {wheel.python} {wheel.abi} {wheel.platform}, and this "
            f"Python is {python} {facts.platform} with glibc {_text(facts.glibc)}."
        )
    if _numbers(wheel.glibc) > facts.glibc:
        yield (
            f"It needs glibc {wheel.glibc}, and here is {_text(facts.glibc)}: build it "
            "on the oldest system."
        )
    if wheel.patches != fingerprint():
        yield "It was built with other patches, by another version of keras_dist."
    for name, has, asked in (("MPI", wheel.mpi, mpi), ("NCCL", wheel.nccl, nccl)):
        if asked is not None and asked != has:
            option = f"--{'no-' * has}{name.lower()}"
            yield f"It has {'' if has else 'no '}{name}, and {option} was given."


def _is_platform(tag: str, facts: Facts) -> bool:
    """Tell whether wheels with this tag are for this system, processor and glibc."""
    match = _MANYLINUX.fullmatch(tag)
    if match is None:
        return tag == facts.platform
    is_old_enough = (int(match[1]), int(match[2])) <= facts.glibc
    return is_old_enough and f"linux_{match[3]}" == facts.platform


def _unloadable(wheel: Wheel, path: Path, facts: Facts) -> Iterator[str]:
    """Yield sentences about libraries of its transports that are missing here."""
    if wheel.nccl and facts.distribution != "tensorflow":
        yield (
            "It has NCCL, which needs the distribution `tensorflow`, and here is "
            f"`{facts.distribution}`."
        )
    for library in needed_libraries(path) if wheel.mpi or wheel.nccl else []:
        if not is_loadable(library):
            is_nccl = "nccl" in library
            advice = "pip install nvidia-nccl-cu12" if is_nccl else here(OPEN_MPI)
            yield f"It needs {library}, which is not found here: {advice}"


def needed_libraries(path: Path) -> list[str]:
    """Return the libraries of MPI and NCCL to which a wheel was linked."""
    names = {name.decode() for name in _LIBRARY.findall(_library_in(path))}
    return sorted(names)


def is_loadable(library: str) -> bool:
    """Tell whether a library is found when Horovod is imported."""
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
    """Return Horovod's library for TensorFlow in a wheel; empty if there is none."""
    with zipfile.ZipFile(path) as files:
        for name in files.namelist():
            if name.startswith("horovod/tensorflow/mpi_lib"):
                return files.read(name)
    return b""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True)
class Built:
    """An installed Horovod.

    Args:
        horovod: Version of Horovod.
        built_for: Version of TensorFlow that it was built for.
        tensorflow: Version of TensorFlow that is installed.
        gloo: Whether it was built with Gloo.
        mpi: Whether it was built with MPI.
        nccl: Whether it was built with NCCL.
        cuda: Version of CUDA that TensorFlow was built for; empty for CPUs alone.
        is_patched: Whether it has keras_dist's patches.
    """

    horovod: str
    built_for: str | None
    tensorflow: str
    gloo: bool
    mpi: bool
    nccl: bool
    cuda: str = ""
    is_patched: bool = False

    def __str__(self) -> str:
        transports = (("Gloo", self.gloo), ("MPI", self.mpi), ("NCCL", self.nccl))
        text = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in transports)
        return (
            f"Horovod {self.horovod} is built for TensorFlow {self.built_for}: {text}."
            f"\n{_PATCHED if self.is_patched else _NOT_PATCHED}"
        )


def is_enough(installed: Built, *, mpi: bool | None, nccl: bool | None) -> bool:
    """Tell whether an installed Horovod need not be built again.

    Args:
        installed: The installed Horovod.
        mpi: Whether MPI is requested.
        nccl: Whether NCCL is requested.
    """
    fits = minor_of(installed.built_for) == minor_of(installed.tensorflow)
    fits = fits and installed.horovod == HOROVOD and installed.is_patched
    return fits and installed.mpi >= bool(mpi) and installed.nccl >= bool(nccl)


def probe() -> tuple[Built | None, str]:
    """Import Horovod in a new interpreter.

    Returns:
        The installed Horovod, or `None` and the end of the error message.
    """
    result = subprocess.run(
        [*PYTHON, "-c", _PROBE],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        return None, "\n".join(result.stderr.splitlines()[-5:])
    found = json.loads(result.stdout.splitlines()[-1])
    return Built(**found, is_patched=horovod_library.is_installed()), ""
