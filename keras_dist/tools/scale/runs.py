"""The runs of a study: start one, follow it, and keep its outcome in a folder."""

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keras_dist.report import json_text, write_whole
from keras_dist.report.training import Study, path_of_fit
from keras_dist.tools import launcher

_STUDY = "study.json"

# Seconds between two looks at a run.
_LOOK = 0.5

# Called with the training so far, and the seconds of the run so far.
Show = Callable[[dict[str, Any] | None, float], None]


class Folder:
    """Keep outcome, training and output of each run, so that a study can be resumed.

    Args:
        path: The folder; created if necessary.
        facts: What the study is, from `facts_of`; another one must not go on here.

    Raises:
        ValueError: If the folder belongs to another study.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        known = _read(path / _STUDY)
        if known is not None and known != facts:
            names = [n for n in {**known, **facts} if known.get(n) != facts.get(n)]
            raise ValueError(
                "The folder has the runs of another study. Received: "
                f"{path}, where {', '.join(sorted(names))} was another. Name another "
                "file by --output, or begin again by --new."
            )
        path.mkdir(parents=True, exist_ok=True)
        write_whole(path / _STUDY, json_text(facts))

    def training_path(self, ranks: int, repeat: int) -> Path:
        """Return where the first rank of a run writes the JSON of its training."""
        return self.path / f"{ranks}-{repeat}.json"

    def log_path(self, ranks: int, repeat: int) -> Path:
        """Return where the output of a run is written."""
        return self.path / f"{ranks}-{repeat}.log"

    def training(self, ranks: int, repeat: int) -> dict[str, Any] | None:
        """Return the training of a run; of several fits, the one with the most rows."""
        path, found, number = str(self.training_path(ranks, repeat)), [], 1
        while (content := _read(Path(path_of_fit(path, number)))) is not None:
            found.append(content)
            number += 1
        return max(found, key=_rows, default=None)

    def clear(self, ranks: int, repeat: int) -> None:
        """Remove the files of an earlier try of a run."""
        for file in self.path.glob(f"{ranks}-{repeat}.*"):
            file.unlink()

    def keep(self, run: Mapping[str, Any]) -> None:
        """Write the outcome of a run."""
        name = f"{run['ranks']}-{run['repeat']}.run.json"
        write_whole(self.path / name, json_text(run))

    def outcome(self, ranks: int, repeat: int) -> dict[str, Any] | None:
        """Return a run that has ended, with its training; else `None`."""
        outcome = _read(self.path / f"{ranks}-{repeat}.run.json")
        if outcome is None:
            return None
        return {**outcome, "training": self.training(ranks, repeat)}


def _rows(training: Mapping[str, Any]) -> int:
    return training["epochs"][-1]["rows"] if training["epochs"] else 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def forget(path: Path) -> None:
    """Remove a folder of runs, if it is one."""
    if (path / _STUDY).is_file():
        shutil.rmtree(path)


def facts_of(words: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Return what identifies a study: its script with its content, and its settings.

    Args:
        words: The script and its arguments.
        **settings: Values of options.
    """
    script = Path(words[0])
    return {
        "script": str(script.resolve()),
        "content": hashlib.sha256(script.read_bytes()).hexdigest(),
        "arguments": list(words[1:]),
        **settings,
    }


@dataclass(frozen=True)
class Launch:
    """How the script is started.

    Args:
        words: The script and its arguments.
        options: Options of `keras-dist run` that say where ranks start.
        study: What the script is asked for; each run sets its path.
    """

    words: Sequence[str]
    options: Sequence[str]
    study: Study

    def run(
        self, folder: Folder, ranks: int, repeat: int, show: Show
    ) -> dict[str, Any]:
        """Run the script on so many ranks until it ends, and keep the outcome.

        Args:
            folder: The folder of the study.
            ranks: Number of ranks.
            repeat: Number of the repeat, from 1.
            show: Called twice a second.
        """
        folder.clear(ranks, repeat)
        path = folder.training_path(ranks, repeat).resolve()
        variable = replace(self.study, path=str(path)).as_variable()
        options = ["-np", str(ranks), *self.options, "--with-parent", str(os.getpid())]
        begin = time.monotonic()
        with folder.log_path(ranks, repeat).open("wb") as log:
            process = launcher.start(
                [*options, *self.words], variable, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                while process.poll() is None:
                    show(folder.training(ranks, repeat), time.monotonic() - begin)
                    launcher.has_ended(process, _LOOK)
            finally:
                launcher.end(process)
        run = {
            "ranks": ranks,
            "repeat": repeat,
            "exit_code": process.returncode,
            "seconds": time.monotonic() - begin,
        }
        training = folder.training(ranks, repeat)
        printed = folder.log_path(ranks, repeat).read_text(errors="replace")
        outcome = {**run, **_judge(training, process.returncode, printed)}
        folder.keep(outcome)
        return {**outcome, "training": training}


def _judge(training: dict[str, Any] | None, code: int, printed: str) -> dict[str, str]:
    """Return the state of a run that has ended, and its cause, or a remark.

    A script may end with an error after its training, for example in a test of the
    accuracy: the training counts.
    """
    reason = launcher.reason_in(printed) or f"exit code {code}"
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
