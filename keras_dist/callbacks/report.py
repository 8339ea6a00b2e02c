"""A page with curves, speed and stragglers, rewritten at the end of each epoch."""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, report
from keras_dist.callbacks.added import MeasuredShares
from keras_dist.callbacks.nan_report import NanReport
from keras_dist.callbacks.throughput import Measured, Throughput, times_by_rank
from keras_dist.report.plan import Plan
from keras_dist.report.training import Epoch, OfRank, Training, plain_logs
from keras_dist.training.session import session_of
from keras_dist.version import __version__


class Clock:
    """Seconds since the first step of a training began, of an earlier process too."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._epoch_begin = time.perf_counter()
        self._earlier = 0.0

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._epoch_begin = time.perf_counter()

    def begin_batch(self) -> None:
        """A step begins; the first one starts the clock."""
        if self._begin is None:
            self._begin = time.perf_counter()

    def add(self, seconds: float) -> None:
        """Add the seconds of the process before a resume."""
        self._earlier += seconds

    def seconds(self) -> float:
        """Seconds since the first step began."""
        own = 0.0 if self._begin is None else time.perf_counter() - self._begin
        return self._earlier + own

    def epoch_seconds(self) -> float:
        """Seconds since this epoch began."""
        return time.perf_counter() - self._epoch_begin


@dataclass(frozen=True)
class FactsOfRank:
    """Facts that a rank sends to the first one at the end of an epoch.

    Args:
        rows: Rows that it has trained on in this epoch, before a resume too.
        memory: The most bytes of memory that its process has used.
        gpu_memory: The most bytes of its GPU; `None` without one.
    """

    rows: int
    memory: int | None
    gpu_memory: int | None


def facts_of_rank(model: Any) -> FactsOfRank:
    """Return the facts of this rank.

    Args:
        model: A model that is trained.
    """
    # Linux counts KiB, and macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    gpu = None
    if tf.config.get_visible_devices("GPU"):
        with contextlib.suppress(ValueError, tf.errors.OpError):
            gpu = int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    rows = session_of(model).rows_trained.total()
    return FactsOfRank(rows, int(memory), gpu)


def begun(
    model: Any,
    devices: Sequence[str],
    plan: Plan | None,
    title: str | None,
    epochs: int,
) -> Training:
    """A training that begins.

    Args:
        model: The model.
        devices: Device of each rank.
        plan: The plan of the fit, if it has one.
        title: Title of the page; `None` for the name of the script.
        epochs: The number of the last epoch.
    """
    script = Path((sys.argv or [""])[0])
    is_script = script.suffix == ".py" and "ipykernel" not in script.name
    now = datetime.datetime.now().astimezone()
    return Training(
        title=title or (script.name if is_script else model.name),
        began=now.isoformat(" ", "seconds"),
        version=__version__,
        size=comm.size(),
        hosts=comm.init().num_hosts,
        devices=devices,
        model=model.name,
        **gradient_facts(model),
        batch=plan.training.batch_size if plan is not None else None,
        epochs_planned=epochs,
        plan=[] if plan is None else [list(line) for line in plan.lines()],
        is_shared=plan is not None and plan.training.is_global,
    )


def gradient_facts(model: Any) -> dict[str, Any]:
    """Count the numbers of a model that are trained, and their bytes."""
    sizes = [
        (math.prod(weight.shape), tf.dtypes.as_dtype(weight.dtype).size)
        for weight in model.trainable_variables
    ]
    return {
        "parameters": sum(number for number, _ in sizes),
        "gradient_bytes": sum(number * size for number, size in sizes),
    }


def epoch_of(
    epoch: int,
    logs: Any,
    clock: Clock,
    measured: Sequence[Measured],
    facts: Sequence[FactsOfRank],
    model: keras.Model,
    rows_before: int,
) -> Epoch:
    """Return what the first rank knows of an epoch.

    Args:
        epoch: Its number, from 1.
        logs: Its logs.
        clock: The clock of the training.
        measured: What `Throughput` has measured on each rank.
        facts: What each rank has sent.
        model: The model.
        rows_before: Rows of all epochs before.
    """
    times = [each.times for each in measured if each.times is not None]
    divided = times_by_rank(times)
    steps = min((len(each.exchanges) for each in times), default=0)
    rows = sum(each.rows for each in measured)
    slowest = max(each.seconds for each in measured)
    first = max((each.first for each in times), default=0.0)
    has_more = first > 0 and steps > 1 and slowest > first
    steady = rows * (steps - 1) / steps / (slowest - first) if has_more else 0.0
    ranks = [
        OfRank(
            rank=rank,
            rows=fact.rows,
            seconds=each.seconds,
            first=time_of.first,
            **vars(phases),
            memory=fact.memory,
            gpu_memory=fact.gpu_memory,
        )
        for rank, (each, time_of, phases, fact) in enumerate(
            zip(measured, times, divided, facts, strict=True)
        )
    ]
    return Epoch(
        epoch=epoch,
        seconds=clock.seconds(),
        training_seconds=slowest,
        epoch_seconds=clock.epoch_seconds(),
        steps=steps,
        rows=rows_before + sum(fact.rows for fact in facts),
        rows_per_second=rows / slowest,
        steady_rows_per_second=steady or rows / slowest,
        logs=plain_logs(logs),
        rates=plain_logs(session_of(model).rates.of_epoch),
        ranks=ranks,
    )


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
        self._measured: list[MeasuredShares] = []
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
        self._measured = [c for c in callbacks if isinstance(c, MeasuredShares)]
        speeds = [c for c in callbacks if isinstance(c, Throughput)]
        self._is_own_speed = not speeds
        self._speed = speeds[0] if speeds else Throughput()
        self._speed.measure_phases()

    def set_params(self, params: dict[str, Any] | None) -> None:
        super().set_params(params)
        if self._is_own_speed:
            self._speed.set_params({**(params or {}), "verbose": 0})

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if self._is_own_speed:
            self._speed.measure_phases()
            self._speed.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._clock = Clock()
        session_of(self.model).rates.keep()
        devices = comm.gather(str(comm.device()))
        self._training = begun(
            self.model, devices, self._plan, self.title, self.params["epochs"]
        )
        comm.run_on_all(self._try)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_own_speed:
            self._speed.on_epoch_begin(epoch, logs)
        self._clock.begin_epoch()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if self._is_own_speed:
            self._speed.on_train_batch_begin(batch, logs)
        self._clock.begin_batch()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._is_own_speed:
            self._speed.on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_own_speed:
            self._speed.on_epoch_end(epoch, logs)
        facts = comm.gather(facts_of_rank(self.model))
        if comm.rank() == 0:
            self._add(epoch, logs, facts)
            self._write()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._is_own_speed:
            self._speed.on_train_end(logs)
        if comm.rank() == 0:
            done = [epoch["epoch"] for epoch in self._training.epochs]
            is_whole = bool(done) and done[-1] >= self._training.epochs_planned
            self._change(state="finished" if is_whole else "stopped")
            self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs so far as JSON, for a checkpoint, on the first rank."""
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
            shares=before.get("shares", []),
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
            shares=[*self._training.shares, *self._changed_shares(epoch)],
            **gradient_facts(self.model),
        )

    def _changed_shares(self, epoch: int) -> list[dict[str, Any]]:
        return [
            {"epoch": epoch + 1, "step": step, "rows": rows}
            for measured in self._measured
            for of_epoch, step, rows in measured.changes
            if of_epoch == epoch
        ]

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
