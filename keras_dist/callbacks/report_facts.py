"""What `Report` reads on a rank, and what it makes of it on the first one."""

import contextlib
import datetime
import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm
from keras_dist.callbacks.breakdown import Measured, times_by_rank
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
    """What a rank sends to the first one at the end of an epoch.

    Args:
        rows: Rows that it has trained on in this epoch, before a resume too.
        memory: The most bytes of memory that its process has used.
        gpu_memory: The most bytes of its GPU; `None` without one.
    """

    rows: int
    memory: int | None
    gpu_memory: int | None


def facts_of_rank(model: Any) -> FactsOfRank:
    """The facts of this rank.

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
    )


def gradient_facts(model: Any) -> dict[str, Any]:
    """How many numbers of a model are trained, and their bytes."""
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
    """What the first rank knows of an epoch.

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
