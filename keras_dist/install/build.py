"""Build Horovod in a temporary folder, install it, and look whether it works."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

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

# -P: a folder of the user's that is called like a package must not hide the package.
_PYTHON = (sys.executable, "-P")
_PIP = (*_PYTHON, "-m", "pip", "--disable-pip-version-check")

# What a new interpreter says about the Horovod that it finds, on its last line.
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


@dataclass(frozen=True)
class Built:
    """What an installed Horovod says about itself.

    Args:
        horovod: Its version.
        built_for: Version of the TensorFlow that it was built for.
        tensorflow: Version of the TensorFlow that is installed.
        gloo: Whether it was built with Gloo.
        mpi: Whether it was built with MPI.
        nccl: Whether it was built with NCCL.
    """

    horovod: str
    built_for: str | None
    tensorflow: str
    gloo: bool
    mpi: bool
    nccl: bool

    def __str__(self) -> str:
        parts = (("Gloo", self.gloo), ("MPI", self.mpi), ("NCCL", self.nccl))
        said = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in parts)
        return (
            f"Horovod {self.horovod} is built for TensorFlow {self.tensorflow}: {said}."
        )


def install_horovod(
    *, mpi: bool | None = None, nccl: bool | None = None, only_if_needed: bool = False
) -> None:
    """Build Horovod for the TensorFlow of this environment, and install it there.

    Args:
        mpi: Whether to build with MPI; `None` for where Open MPI is found.
        nccl: Whether to build with NCCL; `None` for where NCCL and nvcc are found.
        only_if_needed: Whether to leave a Horovod alone that is there already, was
            built for exactly this TensorFlow, and has what is asked for by name.

    Raises:
        InstallError: If something is missing, or a step of the build fails.
    """
    if only_if_needed:
        there, _ = probe()
        if there is not None and is_enough(there, mpi=mpi, nccl=nccl):
            print(there)
            return
    facts = detect()
    missing = find_missing(facts, mpi=bool(mpi), nccl=bool(nccl))
    if missing:
        raise InstallError(explain(missing))
    choice = choose(facts, mpi=mpi, nccl=nccl)
    if nccl is None and facts.cuda_home and facts.nccl and not choice.nccl:
        print(
            "NCCL is here, but is left out: it needs the distribution `tensorflow`, "
            f"2.18 to 2.20. Received: {facts.distribution} {facts.tensorflow}."
        )
    build_and_install(facts, choice)
    there, error = probe()
    if there is None:
        raise InstallError(
            f"Horovod {HOROVOD} was built and installed, but cannot be imported:\n"
            f"{error}\n{remedy_for(error)}".rstrip()
        )
    print(there)


def is_enough(there: Built, *, mpi: bool | None, nccl: bool | None) -> bool:
    """Whether an installed Horovod need not be built again."""
    fits = there.horovod == HOROVOD and there.built_for == there.tensorflow
    return fits and there.mpi >= bool(mpi) and there.nccl >= bool(nccl)


def probe() -> tuple[Built | None, str]:
    """What a new interpreter says about its Horovod, or the error that it ends with."""
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
    return Built(**json.loads(result.stdout.splitlines()[-1])), ""


def build_and_install(facts: Facts, choice: Choice) -> None:
    """Build a wheel in a temporary folder, then install it and what it imports."""
    log_number, log_name = tempfile.mkstemp(prefix="horovod-build-", suffix=".log")
    with (
        tempfile.TemporaryDirectory(prefix="keras-dist-") as folder,
        open(log_number, "w") as log_file,
    ):
        steps = _Steps(log_file, Path(log_name))
        print(f"Building Horovod {HOROVOD} for TensorFlow {facts.tensorflow}.")
        print(f"The whole output goes to {log_name}", flush=True)
        wheel = _build(facts, choice, Path(folder), steps)
        wanted = runtime_requirements(facts.python)
        install = [*_PIP, "install"]
        steps.run("Installing what Horovod imports", [*install, *wanted])
        steps.run(
            "Installing Horovod",
            [*install, "--force-reinstall", "--no-deps", str(wheel)],
        )


def _build(facts: Facts, choice: Choice, folder: Path, steps: "_Steps") -> Path:
    """Build the wheel below `folder` and return where it is."""
    tools, wheels, nccl_home = folder / "tools", folder / "wheels", folder / "nccl"
    steps.run(
        "Fetching the build tools", [*_PIP, "install", "--target", str(tools), *TOOLS]
    )
    if choice.nccl:
        link_nccl(facts, nccl_home)
    # Without isolation the build sees the TensorFlow that is installed here; without
    # the cache pip cannot take a wheel that it built for another one.
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "-v"]
    steps.run(
        "Building Horovod",
        [*_PIP, "wheel", *options, "-w", str(wheels), f"horovod=={HOROVOD}"],
        env=build_environment(
            os.environ, facts=facts, choice=choice, tools=tools, nccl_home=nccl_home
        ),
        has_percent=True,
    )
    return next(wheels.glob("horovod-*.whl"))


class _Steps:
    """Runs one command after the other, with all output in one log."""

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
        """Run a command; an exit code other than 0 becomes an `InstallError`."""
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
