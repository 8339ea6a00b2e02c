"""What `keras-dist scale` shows while it runs."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from keras_dist.report.accuracy import metric_in
from keras_dist.report.numbers import counted, percent, rounded, seconds
from keras_dist.report.training import median_rate
from keras_dist.tools.scale.runs import Show


class Screen:
    """Shows a line for each run, and how far it is.

    Args:
        out: Where to write.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._is_terminal = self._out.isatty()
        self._running = 0

    def title(self, text: str) -> None:
        """Show the first line."""
        self._write(text)

    def name(self, ranks: int, repeat: int, repeats: int) -> str:
        """A run in words."""
        of = f", run {repeat} of {repeats}" if repeats > 1 else ""
        return f"{counted(ranks, 'rank')}{of}:"

    def progress(self, name: str, number: int, planned: int) -> Show:
        """A function that shows how far a run is.

        Args:
            name: The run.
            number: How many runs have ended.
            planned: How many runs there are.
        """
        before = [-1]

        def show(training: Mapping[str, Any] | None, so_far: float) -> None:
            done = len(training["epochs"]) if training is not None else 0
            text = f"{name} {state_of(training)}, {seconds(so_far)}"
            if self._is_terminal:
                self._replace(f"  … {text} ({number + 1} of {planned})")
            elif done != before[0]:
                self._write(f"  {text}")
            before[0] = done

        return show

    def done(
        self, name: str, run: Mapping[str, Any], *, log: Path | None = None
    ) -> None:
        """Show a run that has ended.

        Args:
            name: The run.
            run: Its outcome.
            log: What it has printed; `None` if it ended at an earlier start.
        """
        if run["state"] == "finished":
            text = f"✔ {name} {state_of(run['training'])}, {seconds(run['seconds'])}"
            text += f"; {run['cause']}" * bool(run["cause"])
        else:
            text = f"✘ {name} {run['cause']}; what it printed is in {log}"
        self._write(f"  {text}" + " (of an earlier start)" * (log is None))

    def summary(self, content: Mapping[str, Any], output: Path) -> None:
        """Show the speed by the number of ranks, what limits, and where the page is."""
        self._write("")
        for row in content["by_ranks"]:
            self._write(
                f"  {counted(row['ranks'], 'rank'):>9}: "
                f"{rounded(row['rows_per_second']['median'])} rows/s, efficiency "
                f"{percent(row['efficiency']['median'])}"
            )
        for text in content["limits"]:
            self._write(f"  {text}")
        files = [output, output.with_suffix(".json")]
        self._write(f"\n  {', '.join(dict.fromkeys(map(str, files)))}")

    def _replace(self, line: str) -> None:
        self._clear()
        line = line[: shutil.get_terminal_size().columns - 1]
        self._running = len(line)
        self._out.write(line)
        self._out.flush()

    def _write(self, text: str) -> None:
        self._clear()
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        self._out.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._out.flush()

    def _clear(self) -> None:
        if self._running:
            self._out.write("\r" + " " * self._running + "\r")
            self._running = 0


def state_of(training: Mapping[str, Any] | None) -> str:
    """How far a training is, in words.

    >>> state_of(None), state_of({"epochs": []})
    ('starting', 'in the first epoch')
    """
    if training is None:
        return "starting"
    epochs = training["epochs"]
    if not epochs:
        return "in the first epoch"
    texts = [f"{rounded(median_rate(epochs))} rows/s"]
    name = metric_in(list(epochs[-1]["logs"]))
    if name is not None:
        texts.append(f"{name} {rounded(epochs[-1]['logs'][name])}")
    done = f"{len(epochs)} of {counted(training['epochs_planned'], 'epoch')}"
    return f"{done}, {', '.join(texts)}"
