"""One run of a study: start it, show how far it is, read what it wrote."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keras_dist.report.study import Study
from keras_dist.tools.check.launches import reason_in
from keras_dist.tools.scale.folder import Folder

# Seconds between two looks at a run, and for the launcher to end its ranks.
_LOOK, _END_SECONDS = 0.5, 20.0

# Called with a training that has had another epoch, and the seconds of the run so far.
Show = Callable[[dict[str, Any] | None, float], None]


@dataclass(frozen=True)
class Launch:
    """How the script is started.

    Args:
        words: The script and its arguments.
        options: Options of `keras-dist run` that say where ranks start.
        study: What the script is asked for; its path is that of each run.
    """

    words: Sequence[str]
    options: Sequence[str]
    study: Study

    def run(
        self, folder: Folder, ranks: int, repeat: int, show: Show
    ) -> dict[str, Any]:
        """Run the script on so many ranks, until it has ended, and keep the outcome.

        Args:
            folder: The folder of the study.
            ranks: How many ranks.
            repeat: The number of the repeat, from 1.
            show: Called now and then.
        """
        folder.clear(ranks, repeat)
        path = folder.training_path(ranks, repeat).resolve()
        begin = time.monotonic()
        with folder.log_path(ranks, repeat).open("wb") as log:
            process = self._started(replace(self.study, path=str(path)), ranks, log)
            try:
                while process.poll() is None:
                    show(folder.training(ranks, repeat), time.monotonic() - begin)
                    _wait(process, _LOOK)
            finally:
                _end(process)
        run = {
            "ranks": ranks,
            "repeat": repeat,
            "exit_code": process.returncode,
            "seconds": time.monotonic() - begin,
        }
        training = folder.training(ranks, repeat)
        printed = folder.log_path(ranks, repeat).read_text(errors="replace")
        outcome = {**run, **_judged(training, process.returncode, printed)}
        folder.keep(outcome)
        return {**outcome, "training": training}

    def _started(self, study: Study, ranks: int, log: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "keras_dist", "run", "-np", str(ranks)]
        command += [*self.options, "--with-parent", str(os.getpid()), *self.words]
        return subprocess.Popen(
            command,
            env={**os.environ, **study.as_variable()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the command, which ends this
        )


def _judged(training: dict[str, Any] | None, code: int, printed: str) -> dict[str, str]:
    """The state of a run that has ended, and its cause, or a remark.

    A script may end with an error after its training, as where it tests the accuracy:
    the training counts.
    """
    reason = reason_in(printed) or f"exit code {code}"
    if training is not None and training["state"] != "running":
        remark = f"after its training the script ended with exit code {code}: {reason}"
        return {"state": "finished", "cause": remark if code else ""}
    if code:
        done = len(training["epochs"]) if training is not None else 0
        return {"state": "failed", "cause": f"{reason} (after {done} epochs)"}
    return {
        "state": "failed",
        "cause": (
            "the script ended without a training whose numbers are here: it calls no "
            "`dist_fit`, or its first rank was on a host that writes elsewhere"
        ),
    }


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        _wait(process, _END_SECONDS)
