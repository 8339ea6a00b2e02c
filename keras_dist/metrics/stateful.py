"""Which metrics hold state, and how it comes together."""

from collections.abc import Sequence
from typing import Any

import keras


def stateful_metrics(metrics: Sequence[Any]) -> list[Any]:
    """The metrics that hold state, those inside of others too, each once."""
    found: dict[int, Any] = {}
    for metric in metrics:
        inner = [] if merges(metric) else _inner(metric)
        own = {id(variable) for variable in metric.variables}
        own -= {id(variable) for part in inner for variable in part.variables}
        if own or not (inner or _is_list(metric)):
            found[id(metric)] = metric
        found |= {id(part): part for part in stateful_metrics(inner)}
    return list(found.values())


def merges(metric: Any) -> bool:
    """Whether it has a rule of its own."""
    return callable(getattr(metric, "merge_states", None))


def is_plain(metric: Any) -> bool:
    """Whether it keeps what it knows in Python only."""
    return not metric.variables and not merges(metric)


def rule_of(variable: Any) -> str:
    """How the states of all ranks become one: "sum", "first" or "mean"."""
    aggregation = getattr(variable, "aggregation", "sum")
    return {"sum": "sum", "only_first_replica": "first"}.get(aggregation, "mean")


def exceptions(metrics: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Name and rule of each metric whose state is not summed, as far as is known.

    Args:
        metrics: `Model.metrics`, also of a model that has not seen a batch.
    """
    found = []
    for metric in stateful_metrics([*metrics, *_given_to_compile(metrics)]):
        rules = {rule_of(variable) for variable in metric.variables}
        if merges(metric):
            found.append((metric.name, "by its own merge_states"))
        elif "mean" in rules:
            found.append((metric.name, "state averaged by rows"))
        elif "first" in rules:
            found.append((metric.name, "the first rank's state"))
        elif not rules and not type(metric).__module__.startswith("keras."):
            # One may still make variables when it sees the first batch, as some of
            # Keras's own do.
            found.append((metric.name, "result averaged by rows if without variables"))
    return tuple(found)


def _given_to_compile(metrics: Sequence[Any]) -> list[Any]:
    # Keras lists them when it has seen a batch; before, there is no public name.
    held = [
        getattr(metric, name, None) or []
        for metric in metrics
        for name in ("_user_metrics", "_user_weighted_metrics")
    ]
    leaves = keras.tree.flatten(held)
    return [leaf for leaf in leaves if isinstance(leaf, keras.metrics.Metric)]


def _inner(metric: Any) -> list[Any]:
    # Keras keeps those of `compile` in `metrics`, and a metric's attributes in
    # `_metrics`, for which there is no public name.
    held = [*_list(metric, "metrics"), *_list(metric, "_metrics")]
    return [part for part in held if isinstance(part, keras.metrics.Metric)]


def _list(metric: Any, name: str) -> list[Any]:
    found = getattr(metric, name, None)
    return list(found) if isinstance(found, (list, tuple)) else []


def _is_list(metric: Any) -> bool:
    """Whether it is what Keras keeps the metrics of `compile` in."""
    return isinstance(getattr(metric, "metrics", None), (list, tuple))
