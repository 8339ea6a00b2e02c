"""The packages of this system: messages are written with those of Debian."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The command that installs Open MPI on Debian and Ubuntu.
OPEN_MPI = "apt-get install libopenmpi-dev openmpi-bin"

_DEBIAN = re.compile(r"apt-get install ([\w+-]+(?: [\w+-]+)*)")


@dataclass(frozen=True)
class System:
    """A system's command that installs packages, and its names for Debian's packages.

    Args:
        title: Name of the system, as in a sentence.
        command: The command, up to the packages.
        names: Maps Debian's names to its own; equal names are left out.
        note: What to know about the command.
    """

    title: str
    command: str
    names: Mapping[str, str]
    note: str = "as root or with `sudo`"


DEBIAN = System("Debian or Ubuntu", "apt-get install", {})

_SYSTEMS = {
    "debian": DEBIAN,
    "fedora": System(
        "Fedora or RHEL",
        "dnf install",
        {
            "build-essential": "gcc-c++",
            "g++": "gcc-c++",
            "libopenmpi-dev": "openmpi-devel",
            "openmpi-bin": "openmpi",
            "python3-dev": "python3-devel",
            "python3-venv": "python3",
        },
        "as root or with `sudo`; Open MPI is on the PATH after `module load mpi`",
    ),
    "alpine": System(
        "Alpine",
        "apk add",
        {
            "build-essential": "build-base",
            "libopenmpi-dev": "openmpi-dev",
            "openmpi-bin": "openmpi",
            "python3-venv": "python3",
        },
        "as root; but TensorFlow has no wheels for Alpine's C library: use a system "
        "with glibc, such as Debian",
    ),
    "conda": System(
        "conda, in this environment",
        "conda install -c conda-forge",
        {
            "build-essential": "gxx",
            "g++": "gxx",
            "libopenmpi-dev": "openmpi",
            "openmpi-bin": "openmpi",
            "python3-dev": "python",
            "python3-venv": "python",
        },
        "no `sudo` is needed",
    ),
}

# What /etc/os-release calls them.
_RELATIVES = {"ubuntu": "debian", "rhel": "fedora", "centos": "fedora"}


def system_of(environ: Mapping[str, str], release: str) -> System:
    """Return the system whose packages a user can install here.

    Args:
        environ: Environment variables: conda's environment has packages of its own.
        release: The text of `/etc/os-release`.

    >>> system_of({}, 'ID="rocky"\\nID_LIKE="rhel centos fedora"\\n').title
    'Fedora or RHEL'
    >>> system_of({"CONDA_PREFIX": "/opt/conda"}, "ID=debian\\n").title
    'conda, in this environment'
    """
    if environ.get("CONDA_PREFIX"):
        return _SYSTEMS["conda"]
    found = re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', release, re.MULTILINE)
    for name in " ".join(found).split():
        name = _RELATIVES.get(name, name)
        if name in _SYSTEMS:
            return _SYSTEMS[name]
    return DEBIAN


def this_system() -> System:
    """Return the system of this process."""
    path = Path("/etc/os-release")
    return system_of(os.environ, path.read_text() if path.is_file() else "")


def translated(text: str, system: System) -> str:
    """Replace each `apt-get install …` of a text by the command of a system.

    >>> translated("apt-get install g++ make && keras-dist check", _SYSTEMS["fedora"])
    'dnf install gcc-c++ make && keras-dist check'
    >>> translated("apt-get install libopenmpi-dev openmpi-bin, or", _SYSTEMS["conda"])
    'conda install -c conda-forge openmpi, or'
    """

    def command(match: re.Match[str]) -> str:
        packages = match[1].split(" ")
        names = dict.fromkeys(system.names.get(name, name) for name in packages)
        return f"{system.command} {' '.join(names)}"

    return _DEBIAN.sub(command, text)


def here(text: str) -> str:
    """Replace each `apt-get install …` of a text by the command of this system."""
    return translated(text, this_system())
