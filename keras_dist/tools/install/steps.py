"""Run the commands of an installation: their log, and their errors."""

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# -P: do not import from the current folder, in which a file may hide a package.
PYTHON = (sys.executable, "-P")


def find_pip() -> str | None:
    """Return the path of pip: the installed one, or ensurepip's, which runs as a file.

    An environment of uv has no pip; `uv pip` neither downloads nor builds wheels.
    """
    if (pip := importlib.util.find_spec("pip")) and pip.origin:
        return str(Path(pip.origin).parent)
    bundled = Path(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")
    folder = sysconfig.get_config_var("WHEEL_PKG_DIR") or bundled  # Debian's, Fedora's
    return next((f"{wheel}/pip" for wheel in Path(folder).glob("pip-*.whl")), None)


PIP = (*PYTHON, find_pip() or "", "--disable-pip-version-check")

_LAST_LINES = 20


class Steps:
    """Run commands, and write their output to one log, whose path is `log`."""

    def __init__(self) -> None:
        with tempfile.NamedTemporaryFile(
            prefix="horovod-build-", suffix=".log", delete=False
        ) as file:
            self.log = Path(file.name)

    def run(
        self, what: str, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        """Run a command, print what it does, and raise a `RuntimeError` if it fails.

        Args:
            what: What the command does, for the user.
            command: The command and its arguments.
            env: Its environment; by default that of this process.
        """
        begin = self.log.stat().st_size
        if not self.try_to_run(what, command, env=env):
            output = self.log.read_bytes()[begin:].decode(errors="replace")
            # Files that are compiled at the same time go on after the first error.
            _, *lines = output.splitlines()
            errors = [line for line in lines[:-_LAST_LINES] if "rror: " in line][:1]
            shown = "\n    ".join([*errors, *lines[-_LAST_LINES:]])
            raise RuntimeError(
                f"{what} failed. The first error, and the last lines of its output:\n"
                f"    {shown}\nThe whole output is in {self.log}"
            )

    def try_to_run(
        self, what: str, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> bool:
        """Run a command that may fail, and return whether it succeeded."""
        print(f"{what} ...", flush=True)
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            done = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        return done.returncode == 0
