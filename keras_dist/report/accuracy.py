"""Which of the logs is the accuracy, and when it was reached."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def accuracy_in(names: Iterable[str]) -> str | None:
    """The name of the accuracy in the logs, on validation data if there is one.

    Of several, the one with the shortest name: `val_accuracy` before
    `val_head_accuracy`.

    >>> accuracy_in(["loss", "accuracy", "val_sparse_categorical_accuracy", "val_loss"])
    'val_sparse_categorical_accuracy'
    >>> accuracy_in(["loss", "val_loss", "val_acc"]), accuracy_in(["loss"])
    ('val_acc', None)
    """
    found = [name for name in names if "accuracy" in name or _is_short(name)]
    on_validation = [name for name in found if name.startswith("val_")]
    return min(on_validation or found, key=lambda name: (len(name), name), default=None)


def _is_short(name: str) -> bool:
    return name.removeprefix("val_").rpartition("/")[2] == "acc"


def is_better_low(name: str) -> bool:
    """Whether a low value of the metric is a good one: a loss or an error.

    >>> is_better_low("val_loss"), is_better_low("val_accuracy")
    (True, False)
    """
    words = ("loss", "error", "mae", "mse", "rmse", "mape", "perplexity")
    return any(word in name for word in words)


def metric_in(names: Sequence[str]) -> str | None:
    """The name to compare trainings by: the accuracy, or else the loss.

    >>> metric_in(["loss", "val_loss"]), metric_in([])
    ('val_loss', None)
    """
    found = accuracy_in(names)
    losses = [name for name in ("val_loss", "loss") if name in names]
    return found or next(iter(losses), None)


def reached(
    epochs: Sequence[Mapping[str, Any]], name: str, target: float
) -> Mapping[str, Any] | None:
    """The first epoch in which a metric is at its target or better, or `None`.

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
