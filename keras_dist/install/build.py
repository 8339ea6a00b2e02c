"""Build Horovod in a temporary folder, install it, and check that it works."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from keras_dist.install import patch
from keras_dist.install.facts import Facts, detect
from keras_dist.install.failures import InstallError, describe_failure, remedy_for
from keras_dist.install.flags import (
    HOROVOD,
    TOOLS,
    Choice,
    build_environment,
    choose,
    link_nccl,
    runtime_requirements,
)
from keras_dist.install.progress import Progress
from keras_dist.install.requirements import explain, find_missing

# -P: do not import from the current folder, in which a file may hide a package.
_PYTHON = (sys.executable, "-P")
_PIP = (*_PYTHON, "-m", "pip", "--disable-pip-version-check")

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
}))
"""

_PATCHED = (
    "It has keras_dist's patch: between hosts everything goes over the network that is "
    "named, whatever a host's own name resolves to."
)
_NOT_PATCHED = (
    "It was built elsewhere, without keras_dist's patch: on several hosts each host's "
    "own name has to resolve there to the address by which the others reach it. "
    "`keras-dist install-horovod` builds it with the patch."
)


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
        is_patched: Whether it has keras_dist's change (see `patch`).
    """

    horovod: str
    built_for: str | None
    tensorflow: str
    gloo: bool
    mpi: bool
    nccl: bool
    is_patched: bool = False

    def __str__(self) -> str:
        transports = (("Gloo", self.gloo), ("MPI", self.mpi), ("NCCL", self.nccl))
        text = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in transports)
        return (
            f"Horovod {self.horovod} is built for TensorFlow {self.tensorflow}: {text}."
            f"\n{_PATCHED if self.is_patched else _NOT_PATCHED}"
        )


def install_horovod(
    *,
    mpi: bool | None = None,
    nccl: bool | None = None,
    only_if_needed: bool = False,
    wheel_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Build Horovod for the TensorFlow of this environment, and install it there.

    Args:
        mpi: Whether to build with MPI; `None`: if Open MPI is found.
        nccl: Whether to build with NCCL; `None`: if NCCL and nvcc are found.
        only_if_needed: Whether to do nothing if the installed Horovod was built for
            exactly this TensorFlow with our patch, and has MPI and NCCL if they are
            requested.
        wheel_dir: Folder for a copy of the wheel; by default there is none.

    Raises:
        InstallError: If something is missing, or a step of the build fails.
    """
    if only_if_needed:
        installed, _ = probe()
        if installed is not None and is_enough(installed, mpi=mpi, nccl=nccl):
            print(installed)
            return
    facts = detect()
    missing = find_missing(facts, mpi=bool(mpi), nccl=bool(nccl))
    if missing:
        raise InstallError(explain(missing))
    choice = choose(facts, mpi=mpi, nccl=nccl)
    if nccl is None and facts.cuda_home and facts.nccl and not choice.nccl:
        print(
            "NCCL was found, but is not used: it needs the distribution `tensorflow`, "
            f"2.18 to 2.20. Received: {facts.distribution} {facts.tensorflow}."
        )
    build_and_install(facts, choice, wheel_dir)
    installed, error = probe()
    if installed is None:
        raise InstallError(
            f"Horovod {HOROVOD} was built and installed, but cannot be imported:\n"
            f"{error}\n{remedy_for(error)}".rstrip()
        )
    if not installed.is_patched:
        raise InstallError(
            f"Horovod {HOROVOD} was built and installed, but keras_dist's patch is not "
            f"in it. Received: {patch.installed_library()}. Perhaps another Horovod "
            "comes first in Python's search path."
        )
    print(installed)


def is_enough(installed: Built, *, mpi: bool | None, nccl: bool | None) -> bool:
    """Whether an installed Horovod need not be built again.

    Args:
        installed: The installed Horovod.
        mpi: Whether MPI is requested.
        nccl: Whether NCCL is requested.
    """
    fits = installed.horovod == HOROVOD and installed.built_for == installed.tensorflow
    fits = fits and installed.is_patched
    return fits and installed.mpi >= bool(mpi) and installed.nccl >= bool(nccl)


def probe() -> tuple[Built | None, str]:
    """Import Horovod in a new interpreter.

    Returns:
        The installed Horovod, or `None` and the end of the error message.
    """
    result = subprocess.run(
        [*_PYTHON, "-c", _PROBE],
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
    return Built(**found, is_patched=patch.is_installed()), ""


def build_and_install(
    facts: Facts, choice: Choice, wheel_dir: str | os.PathLike[str] | None = None
) -> None:
    """Build a wheel in a temporary folder, then install it and its requirements."""
    log_number, log_name = tempfile.mkstemp(prefix="horovod-build-", suffix=".log")
    with (
        tempfile.TemporaryDirectory(prefix="keras-dist-") as folder,
        open(log_number, "w") as log_file,
    ):
        steps = _Steps(log_file, Path(log_name))
        print(f"Building Horovod {HOROVOD} for TensorFlow {facts.tensorflow}.")
        print(f"The whole output goes to {log_name}", flush=True)
        wheel = _build(facts, choice, Path(folder), steps)
        requirements = runtime_requirements(facts.python)
        install = [*_PIP, "install"]
        steps.run("Installing what Horovod imports", [*install, *requirements])
        steps.run(
            "Installing Horovod",
            [*install, "--force-reinstall", "--no-deps", str(wheel)],
        )
        if wheel_dir is not None:
            Path(wheel_dir).mkdir(parents=True, exist_ok=True)
            print(f"The wheel is {shutil.copy(wheel, wheel_dir)}")


def _build(facts: Facts, choice: Choice, folder: Path, steps: "_Steps") -> Path:
    """Build the wheel in a folder below `folder`, and return its path."""
    tools, wheels, nccl_home = folder / "tools", folder / "wheels", folder / "nccl"
    steps.run(
        "Fetching the build tools", [*_PIP, "install", "--target", str(tools), *TOOLS]
    )
    if choice.nccl:
        link_nccl(facts, nccl_home)
    env = build_environment(
        os.environ, facts=facts, choice=choice, tools=tools, nccl_home=nccl_home
    )
    # Without isolation the build finds the installed TensorFlow. Without the cache pip
    # does not take a wheel that it has built for another TensorFlow.
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
    fetch = [*_PIP, "download", *options, "--no-binary", "horovod", "-d", str(folder)]
    steps.run(
        "Fetching the source of Horovod", [*fetch, f"horovod=={HOROVOD}"], env=env
    )
    source = patch.unpack(next(folder.glob("horovod-*.tar.gz")), folder / "source")
    patch.apply(source)
    print(f"Patched {patch.FILE}: process sets use the interface that is named.")
    steps.run(
        "Building Horovod",
        [*_PIP, "wheel", *options, "-v", "-w", str(wheels), str(source)],
        env=env,
        has_percent=True,
    )
    return next(wheels.glob("horovod-*.whl"))


class _Steps:
    """Runs the commands of a build, and writes their output to one log."""

    def __init__(self, log_file: TextIO, log: Path):
        self._log_file = log_file
        self._log = log

    def run(
        self,
        what: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        has_percent: bool = False,
    ) -> None:
        """Run a command, and print what it does.

        Args:
            what: What the command does, for the user.
            command: The command and its arguments.
            env: Its environment; by default that of this process.
            has_percent: Whether its output has percentages to show.

        Raises:
            InstallError: If the exit code is not 0.
        """
        self._log_file.write(f"$ {' '.join(command)}\n")
        if not has_percent:
            print(f"{what} ...", flush=True)
            code, output = _execute(command, env, self._log_file, lambda line: None)
        else:
            progress = Progress(what, sys.stdout, is_terminal=sys.stdout.isatty())
            code, output = _execute(command, env, self._log_file, progress.read)
            progress.finish()
        if code != 0:
            raise InstallError(
                describe_failure(what, code=code, output=output, log=self._log)
            )


def _execute(
    command: Sequence[str],
    env: Mapping[str, str] | None,
    log_file: TextIO,
    on_line: Callable[[str], Any],
) -> tuple[int, list[str]]:
    """Run a command; return its exit code, and its output as lines."""
    output = []
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log_file.write(line)
            log_file.flush()
            output.append(line)
            on_line(line)
    return process.returncode, output
