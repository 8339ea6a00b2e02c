"""A page with curves, speed and stragglers, rewritten at the end of each epoch."""

import dataclasses
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_dist import comm, report
from keras_dist.callbacks.nan_report import NanReport
from keras_dist.callbacks.report_facts import (
    Clock,
    FactsOfRank,
    begun,
    epoch_of,
    facts_of_rank,
    gradient_facts,
)
from keras_dist.callbacks.throughput import Throughput
from keras_dist.report.plan import Plan
from keras_dist.training.session import session_of


class Report(keras.callbacks.Callback):
    """Writes a page about the training: learning, speed, breakdown, ranks, memory.

    The first rank rewrites it at the end of each epoch, whole or not at all. The page
    is one file, which needs no network. All its numbers are in a JSON beside it, and a
    path that ends with `.json` writes that alone. All ranks take part, by one exchange
    of a few numbers at the end of each epoch; and where the time goes is measured in
    each step, as by `Throughput(breakdown=True)`.

    With `resume=`, a training that goes on has all its epochs in one report.

    Position in the list: after callbacks that change `logs`.

    Args:
        path: Where to write, `….html` or `….json`.
        title: Title of the page; by default the name of the script.

    Raises:
        ValueError: If `path` ends otherwise.
        ImportError: On all ranks before the first step, if `path` is of a page, and the
            first rank's environment lacks what makes it: `keras-dist[report]`.
        OSError: On all ranks before the first step, if `path` cannot be written.

    Example:

    ```python
    report = keras_dist.Report("run.json")
    keras_dist.dist_fit(model, x, y, epochs=5, callbacks=[report])
    ```
    """

    def __init__(
        self, path: str | os.PathLike[str] = "report.html", title: str | None = None
    ) -> None:
        super().__init__()
        self.path = Path(path)
        if self.path.suffix not in (".html", ".json"):
            raise ValueError(
                "A report is written to a file that ends with .html or .json. "
                f"Received: path={str(path)!r}"
            )
        self.title = title
        self._speed = Throughput()
        self._nan_reports: list[NanReport] = []
        self._is_own_speed = True
        self._plan: Plan | None = None
        self._training: report.Training
        self._clock = Clock()

    def use(self, plan: Plan, callbacks: Sequence[Any]) -> None:
        """Show a plan, and read what other callbacks of the fit have found.

        Args:
            plan: The plan of the fit.
            callbacks: All callbacks of the fit, with a `Throughput`.
        """
        self._plan = plan
        self._nan_reports = [c for c in callbacks if isinstance(c, NanReport)]
        speeds = [c for c in callbacks if isinstance(c, Throughput)]
        self._is_own_speed = not speeds
        self._speed = speeds[0] if speeds else Throughput()
        self._speed.measure_phases()

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        if self._is_own_speed:
            self._speed.set_params({**(params or {}), "verbose": 0})

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if self._is_own_speed:
            self._speed.measure_phases()
            self._speed.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self._clock = Clock()
        session_of(self.model).rates.keep()
        devices = comm.gather(str(comm.device()))
        self._training = begun(
            self.model, devices, self._plan, self.title, self.params["epochs"]
        )
        comm.run_on_all(self._try)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._is_own_speed:
            self._speed.on_epoch_begin(epoch, logs)
        self._clock.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._is_own_speed:
            self._speed.on_train_batch_begin(batch, logs)
        self._clock.begin_batch()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._is_own_speed:
            self._speed.on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._is_own_speed:
            self._speed.on_epoch_end(epoch, logs)
        facts = comm.gather(facts_of_rank(self.model))
        if comm.rank() == 0:
            self._add(epoch, logs, facts)
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        if self._is_own_speed:
            self._speed.on_train_end(logs)
        if comm.rank() == 0:
            done = [epoch["epoch"] for epoch in self._training.epochs]
            is_whole = bool(done) and done[-1] >= self._training.epochs_planned
            self._change(state="finished" if is_whole else "stopped")
            self._write()

    def state_dict(self) -> dict[str, Any]:
        """The epochs so far as JSON, for a checkpoint, on the first rank."""
        if comm.rank() > 0:
            return {}
        seconds = self._clock.seconds()
        return {"seconds": seconds, "report": json.dumps(self._training.as_json())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; called after the training has begun."""
        if comm.rank() > 0 or "report" not in state:
            return
        before = json.loads(state["report"])
        resume = {
            "epoch": len(before["epochs"]) + 1,
            "seconds": state["seconds"],
            "size": comm.size(),
        }
        self._clock.add(state["seconds"])
        self._change(
            began=before["began"],
            epochs=before["epochs"],
            resumes=[*before["resumes"], resume],
            nan_reports=before["nan_reports"],
        )

    def _add(self, epoch: int, logs: Any, facts: Sequence[FactsOfRank]) -> None:
        rows = self._training.epochs[-1]["rows"] if self._training.epochs else 0
        added = epoch_of(
            epoch + 1, logs, self._clock, self._speed.by_rank, facts, self.model, rows
        )
        found = [str(each) for report in self._nan_reports for each in report.found]
        known = [text for text in self._training.nan_reports if text not in found]
        self._change(
            epochs=[*self._training.epochs, dataclasses.asdict(added)],
            nan_reports=[*known, *found],
            **gradient_facts(self.model),
        )

    def _change(self, **changes: Any) -> None:
        self._training = dataclasses.replace(self._training, **changes)

    def _try(self) -> None:
        """Write a report without an epoch: raise now what would fail in hours."""
        if comm.rank() > 0:
            return
        if self.path.suffix == ".html":
            report.check_installed()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write_files()

    def _write(self) -> None:
        try:
            self._write_files()
        except OSError as error:
            warnings.warn(
                "A report could not be written. The training continues, and the report "
                f"of an earlier epoch is still there. Received: {error}",
                stacklevel=2,
            )

    def _write_files(self) -> None:
        content = self._training.as_json()
        report.write_whole(self.path.with_suffix(".json"), report.json_text(content))
        if self.path.suffix == ".html":
            report.write_whole(self.path, report.training_page(content))
