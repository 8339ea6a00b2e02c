"""The JSON of one training, what `keras-dist scale` asks for it, and what follows."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Version of the JSON; a reader refuses another one.
FORMAT = 1

# The phases of a step, in the order in which they are shown.
PHASES = ("computing", "averaging", "waiting", "input")


@dataclass(frozen=True)
class OfRank:
    """What one rank did in an epoch.

    Args:
        rank: The rank.
        rows: Rows on which it trained.
        seconds: Seconds of training, without validation.
        first: Seconds until the second step had its data, if a step was traced;
            included in `computing`.
        computing, averaging, waiting, input: Seconds of each phase; see `Throughput`.
        last_fraction: The fraction of steps in which it was the last to arrive at the
            averaging.
        memory: Most bytes of memory of its process so far.
        gpu_memory: Most bytes of its GPU; `None` without a GPU.
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
        epoch: Number of the epoch, from 1.
        seconds: Seconds from the beginning of the first step to the end of this epoch,
            with validation and callbacks, on the clock of the first rank.
        training_seconds: Seconds of this epoch on the slowest rank, without validation.
        epoch_seconds: Seconds of this epoch, with everything.
        steps: Steps of each rank.
        rows: Rows on which all ranks trained since the training began.
        rows_per_second: Rows per second of all ranks in this epoch.
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
    """Everything known about one training: `as_json` is the content of its file.

    Args:
        title: The script, or the model's name.
        began: Time of the beginning, in ISO format.
        version: Version of keras_dist.
        size, hosts: Number of ranks and of hosts.
        devices: Device of each rank, in words.
        model: Name of the model.
        parameters: Number of trainable parameters.
        gradient_bytes: Bytes of the gradients of a step.
        batch: Rows of a batch of one rank; `None` if the data decides it.
        epochs_planned: Epochs after which the training ends.
        plan: The lines of the printed plan, as pairs.
        state: "running", "finished", or "stopped" before the last epoch.
        epochs: The epochs so far, each an `Epoch` as a dict.
        resumes: For each resume the epoch, the seconds, and the number of ranks.
        nan_reports: Findings of `NanReport`, in words.
        is_shared: Whether `batch` is that of all ranks together (`batch="global"`).
        shares: Changes of the ranks' shares of a batch by their speed: the epoch, the
            step in it after which they changed, and the rows of each rank.
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
    is_shared: bool = False
    shares: Sequence[Mapping[str, Any]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {"format": FORMAT, "kind": "training", **asdict(self)}


def plain_logs(logs: Mapping[str, Any] | None, prefix: str = "") -> dict[str, Any]:
    """Return logs for JSON: only numbers, nested ones with a "/" in the name.

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
    """Return the fraction of the time of all ranks for each phase; they add up to 1.

    Leaves out a first step that was traced, which happens once.

    Args:
        epochs: Epochs of the JSON.
    """
    seconds = seconds_of_phases(epochs)
    total = sum(seconds.values())
    return {phase: value / total if total else 0.0 for phase, value in seconds.items()}


def seconds_of_phases(epochs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return seconds of all ranks in all epochs, by phase, without a traced step."""
    ranks = [rank for epoch in epochs for rank in epoch["ranks"]]
    seconds = {phase: sum(rank[phase] for rank in ranks) for phase in PHASES}
    computing = seconds["computing"] - sum(rank["first"] for rank in ranks)
    return seconds | {"computing": max(0.0, computing)}


def steps_of_phases(epochs: Sequence[Mapping[str, Any]]) -> int:
    """Count the steps of all ranks in all epochs, without a traced first step."""
    return sum(
        max(0, epoch["steps"] - (rank["first"] > 0))
        for epoch in epochs
        for rank in epoch["ranks"]
    )


def rates_of_epochs(epochs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return rows per second of all ranks in each epoch, without a traced step."""
    return [epoch["steady_rows_per_second"] for epoch in epochs]


def median_rate(epochs: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median of `rates_of_epochs`; `None` before the first epoch ended."""
    rates = rates_of_epochs(epochs)
    return statistics.median(rates) if rates else None


def numbers_in(epochs: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Return a value of the logs by epoch; `None` where missing or not finite."""
    values = [epoch["logs"].get(name) for epoch in epochs]
    return [None if isinstance(value, str) else value for value in values]


def accuracy_in(names: Iterable[str]) -> str | None:
    """Return the name of the accuracy in the logs, on validation data if there is one.

    Of several, the one with the shortest name: `val_accuracy` before
    `val_head_accuracy`.

    >>> accuracy_in(["loss", "accuracy", "val_sparse_categorical_accuracy", "val_loss"])
    'val_sparse_categorical_accuracy'
    >>> accuracy_in(["loss", "val_loss", "val_acc"]), accuracy_in(["loss"])
    ('val_acc', None)
    """
    found = [
        name
        for name in names
        if "accuracy" in name or name.removeprefix("val_").rpartition("/")[2] == "acc"
    ]
    on_validation = [name for name in found if name.startswith("val_")]
    return min(on_validation or found, key=lambda name: (len(name), name), default=None)


def is_better_low(name: str) -> bool:
    """Tell whether a low value of the metric is a good one: a loss or an error.

    >>> is_better_low("val_loss"), is_better_low("val_accuracy")
    (True, False)
    """
    words = ("loss", "error", "mae", "mse", "rmse", "mape", "perplexity")
    return any(word in name for word in words)


def metric_in(names: Sequence[str]) -> str | None:
    """Choose the metric for comparisons: the accuracy, or else the loss.

    >>> metric_in(["loss", "val_loss"]), metric_in([])
    ('val_loss', None)
    """
    found = accuracy_in(names)
    losses = [name for name in ("val_loss", "loss") if name in names]
    return found or next(iter(losses), None)


def reached(
    epochs: Sequence[Mapping[str, Any]], name: str, target: float
) -> Mapping[str, Any] | None:
    """Return the first epoch in which a metric is at its target or better, or `None`.

    >>> epochs = [{"epoch": n, "logs": {"acc": n / 10}} for n in (1, 2, 3)]
    >>> reached(epochs, "acc", 0.2)["epoch"], reached(epochs, "acc", 0.5)
    (2, None)
    """
    sign = -1.0 if is_better_low(name) else 1.0
    for epoch in epochs:
        value = epoch["logs"].get(name)
        if isinstance(value, (int, float)) and sign * value >= sign * target:
            return epoch
    return None


# Fraction of the time from which a phase is worth a sentence.
LARGE = 0.1

_CURES = {
    "averaging": (
        "the sum of the gradients over the network. Larger batches average less often; "
        'compression="fp16" sends half of the bytes; sync="every:k" exchanges after '
        "every k steps, and is another training. See docs/levers.md."
    ),
    "waiting": (
        "ranks that wait for the slowest one. Give all ranks the same device, cores "
        "and input, and look for other programs on its host; or give a slow one fewer "
        'rows: batch="global" with shares="measured".'
    ),
    "input": (
        "waiting for the next batch. Divide the work of the input by "
        "keras_dist.shard, prefetch, or decode once: see docs/how_to/data.md."
    ),
}


def limits_of(phases: Mapping[str, float], last: Sequence[float] = ()) -> list[str]:
    """Return a sentence for each phase but computing that takes more than a tenth.

    Args:
        phases: The fraction of the time of each phase.
        last: For each rank the fraction of steps in which it was the last to arrive.

    >>> phases = {"computing": 0.5, "averaging": 0.0, "waiting": 0.05, "input": 0.45}
    >>> print(*limits_of(phases))
    input: 45 % of the time, waiting for the next batch. Divide the work ...
    """
    large = [phase for phase in PHASES[1:] if phases[phase] >= LARGE]
    words = []
    for phase in sorted(large, key=lambda phase: -phases[phase]):
        text = f"{phase}: {phases[phase]:.0%} of the time, ".replace("%", " %")
        words.append(text + _whom(phase, last) + _CURES[phase])
    return words


def _whom(phase: str, last: Sequence[float]) -> str:
    if phase != "waiting" or not last or max(last) < 2 / len(last):
        return ""
    slowest = max(range(len(last)), key=lambda rank: last[rank])
    return f"for rank {slowest} in {last[slowest] * 100:.0f} % of the steps: "


def last_fractions(epochs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each rank the fraction of steps in which it was the last to arrive."""
    counted = [epoch for epoch in epochs if epoch["steps"]]
    steps = sum(epoch["steps"] for epoch in counted)
    size = min((len(epoch["ranks"]) for epoch in counted), default=0)
    return [
        sum(e["ranks"][rank]["last_fraction"] * e["steps"] for e in counted) / steps
        for rank in range(size)
    ]


# The environment variable of a `Study`.
VARIABLE = "KERAS_DIST_STUDY"


@dataclass(frozen=True)
class Study:
    """What `keras-dist scale` asks of `dist_fit` in the script that it runs.

    Args:
        path: Where to write the JSON of the training. Of a second `dist_fit` of the
            process it is `NAME.2.json`, and so on.
        epochs: Epochs in place of the script's own; `None` for these.
        target: Stop when the metric has reached this value; `None` for never.
        metric: The metric in the logs; `None` for the accuracy.
    """

    path: str
    epochs: int | None = None
    target: float | None = None
    metric: str | None = None

    def as_variable(self) -> dict[str, str]:
        """Return the environment variable for the ranks."""
        return {VARIABLE: json.dumps(asdict(self))}


def study_of(environ: Mapping[str, str]) -> Study | None:
    """Return the study to which this process belongs, if it belongs to one.

    >>> study_of(Study("run.json", epochs=2).as_variable())
    Study(path='run.json', epochs=2, target=None, metric=None)
    """
    text = environ.get(VARIABLE)
    return Study(**json.loads(text)) if text else None


def path_of_fit(path: str, number: int) -> str:
    """Return the path for one fit of the process, counted from 1.

    >>> path_of_fit("a/1-1.json", 1), path_of_fit("a/1-1.json", 2)
    ('a/1-1.json', 'a/1-1.2.json')
    """
    return path if number == 1 else f"{path.removesuffix('.json')}.{number}.json"


def rounded(value: Any, digits: int = 4) -> str:
    """Write a number with so many significant digits; "–" if there is none.

    >>> [rounded(value) for value in (12345.6, 0.98765, 1e-05, None, "nan", 3.0)]
    ['12,346', '0.9877', '1e-05', '–', 'nan', '3']
    """
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """Write a fraction in percent.

    >>> percent(0.4123), percent(0.004), percent(None)
    ('41 %', '0.4 %', '–')
    """
    if value is None:
        return "–"
    digits = 1 if 0 < abs(value) < 0.0995 else 0
    return f"{100 * value:.{digits}f} %"


def seconds(value: float | None) -> str:
    """Write a duration in seconds, minutes or hours.

    >>> [seconds(value) for value in (0.5, 42.3, 90, 7300, None)]
    ['0.50 s', '42.3 s', '1 min 30 s', '2 h 1 min', '–']
    """
    if value is None:
        return "–"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(value: float | None) -> str:
    """Write bytes in MB or GB.

    >>> size(1_500_000), size(2_340_000_000), size(None)
    ('1.5 MB', '2.34 GB', '–')
    """
    if value is None:
        return "–"
    if value < 1e9:
        return f"{value / 1e6:,.3g} MB" if value < 1e8 else f"{value / 1e6:,.0f} MB"
    return f"{value / 1e9:,.3g} GB"


def counted(number: int, noun: str) -> str:
    """Write a number and its noun.

    >>> counted(1, "rank"), counted(2, "epoch")
    ('1 rank', '2 epochs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
