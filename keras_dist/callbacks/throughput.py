"""Rows per second of all ranks."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.optimizer import Stopwatch
from keras_dist.report.lines import say
from keras_dist.training import step
from keras_dist.training.session import session_of


@dataclass(frozen=True)
class Times:
    """Times that one rank has measured in an epoch.

    Args:
        seconds: Seconds of the epoch, without validation.
        input: Seconds of them in which the rank waited for the next batch.
        exchanges: Seconds of each step in the collective that averages gradients.
        first: Seconds of them until the second step had its data, if a step was traced:
            what does not come again in later epochs.
    """

    seconds: float
    input: float
    exchanges: Any
    first: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank in an epoch.

    Args:
        rows: Rows that it has trained on.
        seconds: Seconds of the epoch, without validation.
        times: How they are divided; `None` if that was not measured.
    """

    rows: int
    seconds: float
    times: Times | None = None


@dataclass(frozen=True)
class RankTimes:
    """Seconds of an epoch on one rank, which add up to those of the epoch.

    Args:
        computing, averaging, waiting, input: As in `Breakdown`, in seconds.
        last_fraction: The fraction of steps in which this rank arrived last.
    """

    computing: float
    averaging: float
    waiting: float
    input: float
    last_fraction: float


@dataclass(frozen=True)
class Breakdown:
    """Fractions of the total time of all ranks, which add up to 1.

    Args:
        computing: The rest: forward pass, backward pass, update, and Python.
        averaging: The collective itself, as long as it takes the last rank to arrive.
        waiting: In the collective, for the last rank to arrive.
        input: Waiting for the next batch.
        slowest: The rank that most often arrived last; `None` on one rank.
        slowest_fraction: The fraction of steps in which it arrived last.
    """

    computing: float
    averaging: float
    waiting: float
    input: float
    slowest: int | None
    slowest_fraction: float

    def __str__(self) -> str:
        words = [f"{self.computing:.0%} computing"]
        if self.slowest is not None:
            steps = f"{self.slowest_fraction:.0%} of the steps"
            words += [
                f"{self.averaging:.0%} averaging",
                f"{self.waiting:.0%} waiting (for rank {self.slowest} in {steps})",
            ]
        return ", ".join([*words, f"{self.input:.0%} input"])


def breakdown(ranks: Sequence[Times]) -> Breakdown:
    """Divide the total time of all ranks into parts.

    All ranks leave a collective at the same moment. The rank with the shortest time in
    it has therefore arrived last, and its time is that of the collective itself.

    Args:
        ranks: The times of each rank, in rank order, of the same steps.

    >>> ranks = Times(10.0, 1.0, [3.0, 1.0]), Times(10.0, 1.0, [1.0, 1.0])
    >>> print(breakdown(ranks))
    60% computing, 20% averaging, 10% waiting (for rank 1 in 50% of the steps), ...
    """
    total = sum(times.seconds for times in ranks)
    waited = sum(times.input for times in ranks) / total
    steps = min(len(times.exchanges) for times in ranks)
    exchanges = np.array([times.exchanges[:steps] for times in ranks])
    if len(ranks) == 1 or steps == 0:
        return Breakdown(1 - waited, 0.0, 0.0, waited, None, 0.0)
    shortest = exchanges.min(axis=0)
    averaging = len(ranks) * float(shortest.sum()) / total
    waiting = float((exchanges - shortest).sum()) / total
    ((slowest, count),) = Counter(exchanges.argmin(axis=0).tolist()).most_common(1)
    return Breakdown(
        1 - averaging - waiting - waited,
        averaging,
        waiting,
        waited,
        slowest,
        count / steps,
    )


def times_by_rank(ranks: Sequence[Times]) -> list[RankTimes]:
    """Divide the time of each rank into parts, whose sum is that of `breakdown`.

    Args:
        ranks: The times of each rank, in rank order, of the same steps.

    >>> ranks = Times(10.0, 1.0, [3.0, 1.0]), Times(10.0, 1.0, [1.0, 1.0])
    >>> [each.waiting for each in times_by_rank(ranks)]
    [2.0, 0.0]
    """
    steps = min(len(times.exchanges) for times in ranks)
    if len(ranks) == 1 or steps == 0:
        return [RankTimes(t.seconds - t.input, 0.0, 0.0, t.input, 0.0) for t in ranks]
    exchanges = np.array([times.exchanges[:steps] for times in ranks])
    shortest = exchanges.min(axis=0)
    averaging = float(shortest.sum())
    waits = (exchanges - shortest).sum(axis=1)
    last = np.bincount(exchanges.argmin(axis=0), minlength=len(ranks)) / steps
    return [
        RankTimes(
            times.seconds - averaging - float(wait) - times.input,
            averaging,
            float(wait),
            times.input,
            float(fraction),
        )
        for times, wait, fraction in zip(ranks, waits, last, strict=True)
    ]


def waits_for_input(arrivals: np.ndarray, begins: Sequence[float]) -> np.ndarray:
    """Find the seconds that each step has waited for its batch.

    With `steps_per_execution` several steps have one beginning. The wait of the later
    ones is inside the execution, and counts as computing.

    Args:
        arrivals: Time at which the batch of each step was there.
        begins: Time at which each execution began.

    >>> waits_for_input(np.array([1.5, 3.0, 4.5, 6.0]), [1.0, 4.0]).tolist()
    [0.5, 0.0, 0.5, 0.0]
    """
    waits = np.zeros(len(arrivals))
    stride = max(1, -(-len(arrivals) // max(1, len(begins))))
    first = arrivals[::stride][: len(begins)]
    waits[::stride][: len(first)] = np.maximum(0.0, first - begins[: len(first)])
    return waits


# Of the time, above which the line says how to divide the input.
_LARGE_INPUT = 0.1


class Throughput(keras.callbacks.Callback):
    """Puts rows per second over all ranks into the logs of each epoch.

    `logs["rows_per_second"]` is the number of rows that all ranks trained on, divided
    by the seconds of the slowest rank; validation is not included. Keras prints it
    with the other logs.

    Position in the list: before callbacks that read `logs`.

    Args:
        breakdown: Whether to measure where the time is spent, too. The first rank
            prints it in a line an epoch, unless `fit` was called with `verbose=0`, and
            it is logged as `logs["computing"]`, `["averaging"]`, `["waiting"]` (for the
            slowest rank) and `["input"]`: fractions of the total time of all ranks,
            which add up to 1. They cover at most the first 262,144 steps of an epoch.
            If the input is more than 10 %, and every rank makes the batches of all
            ranks, a line says how to divide that work: `keras_dist.shard`. In the first
            epoch, tracing counts as computing. On a GPU, where work is queued, they may
            measure the queue: use `timeline` there.

    Attributes:
        by_rank: What each rank measured in the last epoch, in rank order.

    Raises:
        RuntimeError: At the end of an epoch, if another rank has ended.

    Example:

    ```python
    speed = keras_dist.Throughput(breakdown=True)
    history = keras_dist.dist_fit(model, x, y, callbacks=[speed])
    history.history["rows_per_second"], history.history["waiting"]
    ```
    """

    def __init__(self, breakdown: bool = False) -> None:
        super().__init__()
        self.breakdown = breakdown
        self.by_rank: tuple[Measured, ...] = ()
        self._has_phases = breakdown
        self._begins: list[float] = []
        self._begin = 0.0
        self._measured: tuple[int, float] | None = None
        self._line = ""
        self._rows_for_own: float | None = None

    def measure_phases(self) -> None:
        """Measure where the time is spent, too, without printing or logging it."""
        self._has_phases = True

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        session = step.install(model)
        if self._has_phases:
            session.instruments.time_steps()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._print()
        session_of(self.model).rows_trained.begin_epoch()
        self._measured = None
        if self._has_phases:
            self._stopwatch().reset()
            self._begins.clear()
        self._begin = time.perf_counter()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if self._has_phases:
            self._begins.append(time.time())

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._measure()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        times = self._times() if self._has_phases else None
        self.by_rank = tuple(comm.gather(Measured(*self._measure(), times)))
        rows = sum(measured.rows for measured in self.by_rank)
        self._rows_for_own = rows / max(1, self._measure()[0])
        rate = rows / max(measured.seconds for measured in self.by_rank)
        if logs is not None:
            logs["rows_per_second"] = rate
        divided = [measured.times for measured in self.by_rank if measured.times]
        if self.breakdown and len(divided) == len(self.by_rank):
            fractions = breakdown(divided)
            advice = self._advice(fractions.input)
            self._line = f"epoch {epoch + 1}: {fractions}{advice}"
            if logs is not None:
                for name in ("computing", "averaging", "waiting", "input"):
                    logs[name] = getattr(fractions, name)

    def rate_so_far(self) -> float:
        """Rows per second of all ranks in this epoch, without asking the others.

        Each of them is taken to have as many rows as this one or, from the second epoch
        on, as many for each row of this one as in the epoch before.
        """
        rows = session_of(self.model).rows_trained.of_this_process()
        of_all = rows * (self._rows_for_own or comm.size())
        return of_all / (time.perf_counter() - self._begin)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._print()
        step.uninstall(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Empty: another process has another clock."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def _advice(self, fraction: float) -> str:
        feed = session_of(self.model).training_data.feed
        source = None if feed is None else feed.made_by_all
        if fraction <= _LARGE_INPUT or source is None:
            return ""
        if source.kind == "dataset":
            line = "put\n  .apply(keras_dist.shard(batch_size)) before its first map"
        else:
            line = "loop over\n  keras_dist.shard(names) where it reads them"
        return (
            "\n  Every rank makes the batches of all ranks. To divide the work of the "
            f"{source.type_name}, {line}"
        )

    def _measure(self) -> tuple[int, float]:
        if self._measured is None:
            # Reading the number of rows waits for the last step to end.
            rows = session_of(self.model).rows_trained.of_this_process()
            self._measured = rows, time.perf_counter() - self._begin
        return self._measured

    def _times(self) -> Times:
        stopwatch = self._stopwatch()
        arrivals, exchanges = stopwatch.read()
        waits, first = waits_for_input(arrivals, self._begins), 0.0
        if stopwatch.has_traced:  # the first wait was tracing, not input
            waits[:1] = 0.0
            begin = sum(self._begins[:1])
            first = float(arrivals[:2].max(initial=0.0) - begin)
        return Times(self._measure()[1], float(waits.sum()), exchanges, max(0.0, first))

    def _stopwatch(self) -> Stopwatch:
        stopwatch = session_of(self.model).instruments.stopwatch
        assert stopwatch is not None  # set by `set_model`
        return stopwatch

    def _print(self) -> None:
        # Called after the end of the epoch, when the progress bar has ended its line.
        if self._line and comm.rank() == 0 and self.params.get("verbose"):
            say(self._line)
        self._line = ""


class TrainingTime(keras.callbacks.Callback):
    """Counts the seconds since the training began, including validation.

    After each epoch they are in `logs["training_seconds"]` and in the attribute
    `seconds`. At the end the first rank prints them, unless `fit` was called with
    `verbose=0`. All ranks use the clock of the first rank.

    Position in the list: before callbacks that read `logs`.

    Attributes:
        seconds: Seconds until the end of the last epoch, or of the training.

    Raises:
        RuntimeError: At the end of an epoch, if another rank has ended.

    Example:

    ```python
    clock = keras_dist.TrainingTime()
    history = keras_dist.dist_fit(model, x, y, epochs=5, callbacks=[clock])
    clock.seconds, history.history["training_seconds"]
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._begin = 0.0
        self._epochs = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._begin = time.perf_counter()
        self._epochs = 0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epochs += 1
        self._read()
        if logs is not None:
            logs["training_seconds"] = self.seconds

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._read()
        if comm.rank() == 0 and self.params.get("verbose"):
            epochs = f"{self._epochs} epoch{'' if self._epochs == 1 else 's'}"
            say(f"trained {epochs} in {self.seconds:.1f} s")

    def state_dict(self) -> dict[str, Any]:
        """Seconds and epochs so far, for a checkpoint."""
        return {"seconds": self._seconds_now(), "epochs": self._epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; called after the training has begun."""
        self._begin -= state["seconds"]
        self._epochs = state["epochs"]

    def _seconds_now(self) -> float:
        return time.perf_counter() - self._begin

    def _read(self) -> None:
        self.seconds = comm.broadcast(self._seconds_now())
