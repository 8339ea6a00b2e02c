"""The report on its metrics that each rank sends to the others before the allreduce."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_dist.training.metrics.stateful import is_without_state, merges, rule_of
from keras_dist.training.metrics.step_logs import names_of

_ADVICE = "Compile and track the same metrics on every rank."


@dataclass(frozen=True)
class Seen:
    """How much data the metrics of one rank have been updated with since their reset.

    Args:
        rows: Rows of data.
        steps: Batches.
        last_rows: Rows of the last batch.
        has_rows: `False` if this rank evaluated a copy of another rank's row, so that
            its state must not be counted.
    """

    rows: int = 0
    steps: int = 0
    last_rows: int = 0
    has_rows: bool = True


@dataclass(frozen=True)
class RankReport:
    """What one rank sends to the others about its metrics.

    Args:
        states: Name of each metric, and shape and rule of each of its variables.
        seen: How much data they have been updated with.
        log_names: Names that the last step returned, as `names_of`; `None` if the logs
            are not to be synchronized.
        merging: States of the metrics that have a method `merge_states`.
        results: Results of the metrics that have no variables.
    """

    states: list[tuple[str, list[str]]]
    seen: Seen
    log_names: list[str] | None
    merging: list[list[np.ndarray]]
    results: list[Any]


def report_of_rank(metrics: Sequence[Any], seen: Seen, logs: Any) -> RankReport:
    """This rank's report.

    Args:
        metrics: The metrics that hold state.
        seen: How much data they have been updated with.
        logs: What the last step returned, or `None`.
    """
    states = [
        (metric.name, [f"{tuple(v.shape)} {rule_of(v)}" for v in metric.variables])
        for metric in metrics
    ]
    counted = metrics if seen.has_rows else []
    return RankReport(
        states,
        seen,
        names_of(logs) if isinstance(logs, Mapping) else None,
        [arrays_of(metric.variables) for metric in counted if merges(metric)],
        [on_host(metric.result()) for metric in counted if is_without_state(metric)],
    )


def check(reports: Sequence[RankReport]) -> None:
    """Raise an error if the ranks' metrics differ: their allreduce would never end.

    Args:
        reports: Of all ranks, in rank order.

    Raises:
        ValueError: The same on all ranks.
    """
    names = [Counter(name for name, _ in report.states) for report in reports]
    # Each with the first rank's: with each other, a thousand ranks are a million pairs.
    pairs = [(0, rank) for rank in range(len(names))]
    for rank, other in [*pairs, *((rank, 0) for _, rank in pairs)]:
        for name in names[rank] - names[other]:
            raise ValueError(
                f"Rank {rank} has the metric {name!r}, which rank {other} does "
                f"not have. Received: {_listed(map(sorted, names))}. {_ADVICE}"
            )
    for states in zip(*(report.states for report in reports), strict=True):
        if any(state != states[0] for state in states):
            raise ValueError(
                f"The ranks disagree on the state of the metric {states[0][0]!r}. "
                f"Received: {_listed(states)}. {_ADVICE}"
            )
    logged = [report.log_names for report in reports]
    if any(log_names != logged[0] for log_names in logged):
        raise ValueError(
            "The ranks disagree on the names in the logs. Received: "
            f"{_listed(logged)}. Log the same names on every rank."
        )


def arrays_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """Copies of the values of some variables."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def on_host(result: Any) -> Any:
    """A metric's result as Python numbers and NumPy arrays, copied."""

    def copy(value: Any) -> Any:
        array = np.array(keras.ops.convert_to_numpy(value))
        return array.item() if array.ndim == 0 else array

    return keras.tree.map_structure(copy, result)


def _listed(values: Any) -> str:
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
