"""Run the commands of an installation, and keep their output in a log."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from keras_dist.tools.install.failures import InstallError, describe_failure
from keras_dist.tools.install.progress import Progress

# -P: do not import from the current folder, in which a file may hide a package.
PYTHON = (sys.executable, "-P")
PIP = (*PYTHON, "-m", "pip", "--disable-pip-version-check")


class Steps:
    """Runs commands, and writes their output to one log.

    Args:
        log_file: The log.
        log: Its path.
    """

    def __init__(self, log_file: TextIO, log: Path) -> None:
        self._log_file = log_file
        self.log = log

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
        if not has_percent:
            print(f"{what} ...", flush=True)
            code, output = self._execute(command, env, lambda line: None)
        else:
            progress = Progress(what, sys.stdout, is_terminal=sys.stdout.isatty())
            code, output = self._execute(command, env, progress.read)
            progress.finish()
        if code != 0:
            raise InstallError(
                describe_failure(what, code=code, output=output, log=self.log)
            )

    def try_to_run(self, what: str, command: Sequence[str]) -> bool:
        """Run a command that may fail, and return whether it did not.

        Args:
            what: What the command does, for the user.
            command: The command and its arguments.
        """
        print(f"{what} ...", flush=True)
        return self._execute(command, None, lambda line: None)[0] == 0

    def _execute(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        on_line: Callable[[str], Any],
    ) -> tuple[int, list[str]]:
        self._log_file.write(f"$ {' '.join(command)}\n")
        return _execute(command, env, self._log_file, on_line)


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
