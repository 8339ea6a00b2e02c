"""What the ranks tell each other before they sum their states."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_dist.metrics.stateful import is_plain, merges, rule_of

_ADVICE = "Compile and track the same metrics on every rank."


@dataclass(frozen=True)
class Seen:
    """What the metrics of one rank have been shown since they were reset.

    Args:
        rows: Rows of data.
        steps: Batches.
        last_rows: Rows of the last batch.
        has_rows: `False` where this rank's state must not count.
    """

    rows: int = 0
    steps: int = 0
    last_rows: int = 0
    has_rows: bool = True


@dataclass(frozen=True)
class RankReport:
    """One rank's metrics, as the others have to know them.

    Args:
        states: Name of each metric, and shape and rule of each of its variables.
        seen: What they have seen.
        log_names: Names that the last step returned, `None` where they do not count.
        merging: States of the metrics that have a rule of their own.
        results: Results of the metrics that have no variables.
    """

    states: list[tuple[str, list[str]]]
    seen: Seen
    log_names: list[str] | None
    merging: list[list[np.ndarray]]
    results: list[Any]


def report_of_rank(pieces: Sequence[Any], seen: Seen, logs: Any) -> RankReport:
    """What this rank tells."""
    states = [
        (part.name, [f"{tuple(v.shape)} {rule_of(v)}" for v in part.variables])
        for part in pieces
    ]
    counting = pieces if seen.has_rows else []
    return RankReport(
        states,
        seen,
        sorted(logs) if isinstance(logs, Mapping) else None,
        [arrays_of(part.variables) for part in counting if merges(part)],
        [on_host(part.result()) for part in counting if is_plain(part)],
    )


def check(everyone: Sequence[RankReport]) -> None:
    """Raise where the ranks cannot sum, before they wait for each other.

    Raises:
        ValueError: The same on all ranks.
    """
    names = [Counter(name for name, _ in report.states) for report in everyone]
    for rank, held in enumerate(names):
        for other, known in enumerate(names):
            for name in held - known:
                raise ValueError(
                    f"Rank {rank} has the metric {name!r}, which rank {other} does "
                    f"not have. Received: {_listed(map(sorted, names))}. {_ADVICE}"
                )
    for states in zip(*(report.states for report in everyone), strict=True):
        if any(state != states[0] for state in states):
            raise ValueError(
                f"The ranks disagree on the state of the metric {states[0][0]!r}. "
                f"Received: {_listed(states)}. {_ADVICE}"
            )
    logged = [report.log_names for report in everyone]
    if any(own != logged[0] for own in logged):
        raise ValueError(
            "The ranks disagree on the names in the logs. Received: "
            f"{_listed(logged)}. Log the same names on every rank."
        )


def arrays_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """Copies of the values of variables."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def on_host(result: Any) -> Any:
    """A result without tensors and variables: numbers and arrays, copied."""

    def copy(value: Any) -> Any:
        array = np.array(keras.ops.convert_to_numpy(value))
        return array.item() if array.ndim == 0 else array

    return keras.tree.map_structure(copy, result)


def _listed(values: Any) -> str:
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
