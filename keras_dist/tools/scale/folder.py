"""The folder of the runs of a study, by which an interrupted one goes on."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_dist.report import json_text, write_whole
from keras_dist.report.study import path_of_fit

_STUDY = "study.json"


class Folder:
    """Holds the outcome, the training and the output of each run.

    Args:
        path: The folder; it is made when the first run is kept.
        facts: What the study is: another one must not go on here.

    Raises:
        ValueError: If the folder is one of another study.
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
        """Where the first rank of a run writes the JSON of its training."""
        return self.path / f"{ranks}-{repeat}.json"

    def log_path(self, ranks: int, repeat: int) -> Path:
        """Where what a run prints is written."""
        return self.path / f"{ranks}-{repeat}.log"

    def training(self, ranks: int, repeat: int) -> dict[str, Any] | None:
        """The training of a run; of several fits, the one with the most rows."""
        path, found, number = str(self.training_path(ranks, repeat)), [], 1
        while (content := _read(Path(path_of_fit(path, number)))) is not None:
            found.append(content)
            number += 1
        return max(found, key=_rows, default=None)

    def clear(self, ranks: int, repeat: int) -> None:
        """Remove what an earlier try of a run has left."""
        for file in self.path.glob(f"{ranks}-{repeat}.*"):
            file.unlink()

    def keep(self, run: Mapping[str, Any]) -> None:
        """Write the outcome of a run."""
        name = f"{run['ranks']}-{run['repeat']}.run.json"
        outcome = {name: value for name, value in run.items() if name != "training"}
        write_whole(self.path / name, json_text(outcome))

    def outcome(self, ranks: int, repeat: int) -> dict[str, Any] | None:
        """A run as `keep` was given it; `None` if it has not ended."""
        outcome = _read(self.path / f"{ranks}-{repeat}.run.json")
        if outcome is None:
            return None
        return {**outcome, "training": self.training(ranks, repeat)}


def forget(path: Path) -> None:
    """Remove a folder of runs, if it is one."""
    if (path / _STUDY).is_file():
        shutil.rmtree(path)


def _rows(training: Mapping[str, Any]) -> int:
    return training["epochs"][-1]["rows"] if training["epochs"] else 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def facts_of(words: Sequence[str], **settings: Any) -> dict[str, Any]:
    """What a study is: its script with its content, and the settings that matter.

    Args:
        words: The script and its arguments.
        settings: Names and values of options.
    """
    script = Path(words[0])
    content = script.read_bytes()
    return {
        "script": str(script.resolve()),
        "content": hashlib.sha256(content).hexdigest(),
        "arguments": list(words[1:]),
        **settings,
    }
