"""Run the ranks of a stage, and again after the check at which they died."""

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from keras_dist.launch.startup_noise import VARIABLE as VERBOSE
from keras_dist.launch.startup_noise import is_verbose
from keras_dist.tools import launcher
from keras_dist.tools.check.checks import (
    BEGUN,
    CONNECT,
    FAILED,
    UNTRIED,
    Result,
    Stage,
    result_in,
)

# Seconds for the last lines of a launcher that has ended.
_END_SECONDS = 20.0

# Messages of the launcher where ranks could not all start, and the check of the first
# stage that is about each. Any other message belongs to the check that was running.
_CAUSES = (
    (r"resolves there to|A host cannot be reached", "names"),
    (r" cannot reach ", "network"),
    (r"versions of keras_dist on the", "versions"),
    (r"Horovod is not installed|Horovod cannot be used", "Horovod"),
)

_HOSTS = "What each host needs is in the documentation, on the page of several hosts."

Show = Callable[[Result], None]


@dataclass(frozen=True)
class Launcher:
    """How ranks are started.

    Args:
        options: Options of `keras-dist run`: how many ranks, and on which hosts.
        seconds: The longest that a launch may take; `None` for that of its stage.
    """

    options: Sequence[str]
    seconds: float | None = None

    def run(self, stage: Stage, arguments: Sequence[str], show: Show) -> None:
        """Run all checks of a stage; each is shown once.

        A launch that dies or hangs fails the check that was running, and the checks
        after it get another launch. If none has begun, the ranks cannot be started.

        Args:
            stage: The stage.
            arguments: Arguments for its ranks.
            show: Called with each result, and when a check begins.
        """
        left = list(stage.checks)
        while left:
            begun, reason = self._launched(stage, left, arguments, show)
            if not left:
                return
            known = _cause_of(reason, left)
            failed = begun[-1] if begun and begun[-1] in left else left[0]
            cure = _HOSTS if known else _cure(stage)
            show(Result(*(known or failed), FAILED, reason, cure))
            left.remove(known or failed)
            if failed == CONNECT or known or not begun:
                break
        for key in left:
            show(Result(*key, UNTRIED, "the ranks had ended before"))

    def _launched(
        self,
        stage: Stage,
        left: list[tuple[str, str]],
        arguments: Sequence[str],
        show: Show,
    ) -> tuple[list[tuple[str, str]], str]:
        """Run the rest of a stage, and remove from it what is reported.

        Returns:
            The checks that have begun, and why the launch has ended.
        """
        words = [stage.name, "--checks", ",".join(name for _, name in left)]
        command = self._command(stage, [*words, *arguments])
        seconds = stage.seconds if self.seconds is None else self.seconds
        begun: list[tuple[str, str]] = []
        with _Process(command, stage.environment) as process:
            for result in process.results(seconds):
                if result.key not in left:
                    continue
                show(result)
                if result.status == BEGUN:
                    begun.append(result.key)
                else:
                    left.remove(result.key)
            return begun, process.reason(seconds)

    def _command(self, stage: Stage, words: Sequence[str]) -> list[str]:
        options = [*self.options, "--restarts", str(stage.restarts)]
        if stage.has_package:
            return [*options, "-m", "keras_dist.tools.check", *words]
        # `env` makes it a program: a module would import the package before.
        program = ["env", sys.executable, "-m", "keras_dist", "check-rank"]
        return [*options, *program, *words]


class _Process:
    """A launcher: what its ranks report, and why it ended."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        quiet = {} if is_verbose() else {"TF_CPP_MIN_LOG_LEVEL": "3"}
        self._process = launcher.start(
            words,
            {**quiet, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        self._is_late = False
        read = [self._read_lines, self._read_errors]
        self._threads = [threading.Thread(target=each, daemon=True) for each in read]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *error: object) -> None:
        launcher.end(self._process)

    def results(self, seconds: float) -> Iterator[Result]:
        """Yield what the ranks report, until the launcher ends or time is over."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self._is_late = True
                return
            if line is None:
                break
            result = result_in(line)
            if result is not None:
                yield result
        self._is_late = not launcher.has_ended(self._process, end - time.monotonic())
        self._threads[1].join(_END_SECONDS)

    def reason(self, seconds: float) -> str:
        """Say why the launch has not reported everything."""
        if self._is_late:
            return f"it did not end in {seconds:g} s"
        found = launcher.reason_in("".join(self._errors))
        return found or f"the launch ended with exit code {self._process.returncode}"

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line)
            if is_verbose():
                sys.stderr.write(line)
            del self._errors[:-1000]


def _cause_of(reason: str, left: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Find the check that a message of the launcher is about, if it is known."""
    for pattern, name in _CAUSES:
        if re.search(pattern, reason) and ("environment", name) in left:
            return "environment", name
    return None


def _cure(stage: Stage) -> str:
    return (
        f"{VERBOSE}=1 and `--only {stage.name}` show all that the ranks print; docs/"
        "troubleshooting.md has the errors."
    )
