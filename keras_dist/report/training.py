"""The content of the JSON of one training."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Of the JSON; a reader of another one says so.
FORMAT = 1

# The phases of a step, in the order in which they are shown.
PHASES = ("computing", "averaging", "waiting", "input")


@dataclass(frozen=True)
class OfRank:
    """What one rank did in an epoch.

    Args:
        rank: The rank.
        rows: Rows that it has trained on.
        seconds: Seconds that it has trained, without validation.
        first: Seconds until the second step had its data, if a step was traced; they
            are within `computing`.
        computing, averaging, waiting, input: Seconds of these, as in `Throughput`.
        last_fraction: The fraction of steps in which it was the last to arrive at the
            averaging.
        memory: The most bytes of memory that its process has used so far.
        gpu_memory: The most bytes of its GPU; `None` without a GPU.
    """

    rank: int
    rows: int
    seconds: float
    first: float
    computing: float
    averaging: float
    waiting: float
    input: float
    last_fraction: float
    memory: int | None
    gpu_memory: int | None


@dataclass(frozen=True)
class Epoch:
    """One epoch of a training.

    Args:
        epoch: Its number, from 1.
        seconds: From the begin of the first step of the training to the end of this
            epoch, with validation and callbacks, on the clock of the first rank.
        training_seconds: Of this epoch, without validation, of the slowest rank.
        epoch_seconds: Of this epoch, with all of it.
        steps: Steps of each rank.
        rows: Rows that all ranks have trained on since the training began.
        rows_per_second: Of all ranks in this epoch.
        steady_rows_per_second: The same without the first step, if it was traced in
            this epoch.
        logs: Keras's logs. A number that is not finite is text: "nan", "inf".
        rates: Learning rates that the last update used, by name.
        ranks: What each rank did.
    """

    epoch: int
    seconds: float
    training_seconds: float
    epoch_seconds: float
    steps: int
    rows: int
    rows_per_second: float
    steady_rows_per_second: float
    logs: Mapping[str, Any]
    rates: Mapping[str, Any]
    ranks: Sequence[OfRank]


@dataclass(frozen=True)
class Training:
    """All that is known of one training: `as_json` is what the file holds.

    Args:
        title: The script, or the model's name.
        began: When it began, as ISO time.
        version: Of keras_dist.
        size, hosts: How many ranks, on how many hosts.
        devices: Device of each rank, in words.
        model: Name of the model.
        parameters: How many numbers are trained.
        gradient_bytes: Bytes of the gradients of a step.
        batch: Rows of a batch of one rank; `None` if the data decides it.
        epochs_planned: Epochs after which the training ends.
        plan: The lines of the printed plan, as pairs.
        state: "running", "finished", or "stopped" before the last epoch.
        epochs: The epochs so far, each an `Epoch` as a dict.
        resumes: For each resume the epoch, the seconds, and the number of ranks.
        nan_reports: What `NanReport` has found, in words.
    """

    title: str
    began: str
    version: str
    size: int
    hosts: int
    devices: Sequence[str]
    model: str
    parameters: int
    gradient_bytes: int
    batch: int | None
    epochs_planned: int
    plan: Sequence[Sequence[str]]
    state: str = "running"
    epochs: Sequence[Mapping[str, Any]] = ()
    resumes: Sequence[Mapping[str, Any]] = field(default_factory=list)
    nan_reports: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {"format": FORMAT, "kind": "training", **asdict(self)}


def plain_logs(logs: Mapping[str, Any] | None, prefix: str = "") -> dict[str, Any]:
    """Logs as JSON has them: nested ones with a "/" in the name, numbers alone.

    >>> plain_logs({"loss": 0.5, "out": {"accuracy": float("nan")}, "name": "x"})
    {'loss': 0.5, 'out/accuracy': 'nan'}
    """
    plain: dict[str, Any] = {}
    for name, value in (logs or {}).items():
        if isinstance(value, Mapping):
            plain |= plain_logs(value, f"{prefix}{name}/")
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        plain[f"{prefix}{name}"] = number if math.isfinite(number) else str(number)
    return plain


def phases_of(epochs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fractions of the time of all ranks, by phase, which add up to 1.

    Without the first step where it was traced: that does not come again.

    Args:
        epochs: Epochs of the JSON.
    """
    seconds = seconds_of_phases(epochs)
    total = sum(seconds.values())
    return {phase: value / total if total else 0.0 for phase, value in seconds.items()}


def seconds_of_phases(epochs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all ranks in all epochs, by phase, without a first step of tracing."""
    ranks = [rank for epoch in epochs for rank in epoch["ranks"]]
    seconds = {phase: sum(rank[phase] for rank in ranks) for phase in PHASES}
    computing = seconds["computing"] - sum(rank["first"] for rank in ranks)
    return seconds | {"computing": max(0.0, computing)}


def steps_of_phases(epochs: Sequence[Mapping[str, Any]]) -> int:
    """Steps of all ranks in all epochs, without a first step of tracing."""
    return sum(
        max(0, epoch["steps"] - (rank["first"] > 0))
        for epoch in epochs
        for rank in epoch["ranks"]
    )


def rates_of_epochs(epochs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Rows per second of all ranks in each epoch, without a first step of tracing."""
    return [epoch["steady_rows_per_second"] for epoch in epochs]


def median_rate(epochs: Sequence[Mapping[str, Any]]) -> float | None:
    """The median of `rates_of_epochs`; `None` before the end of the first epoch."""
    rates = rates_of_epochs(epochs)
    return statistics.median(rates) if rates else None


def numbers_in(epochs: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """A value of the logs in each epoch; `None` where it is missing or not finite."""
    values = [epoch["logs"].get(name) for epoch in epochs]
    return [None if isinstance(value, str) else value for value in values]
