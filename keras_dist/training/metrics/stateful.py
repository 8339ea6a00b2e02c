"""Which metrics hold state, and by which rule the states of all ranks become one."""

from collections.abc import Sequence
from typing import Any

import keras


def stateful_metrics(metrics: Sequence[Any]) -> list[Any]:
    """The metrics that hold state, also those nested in other metrics, each once."""
    stateful: dict[int, Any] = {}
    for metric in metrics:
        inner = [] if merges(metric) else _inner(metric)
        own = {id(variable) for variable in metric.variables}
        own -= {id(variable) for nested in inner for variable in nested.variables}
        if own or not (inner or _is_container(metric)):
            stateful[id(metric)] = metric
        stateful |= {id(nested): nested for nested in stateful_metrics(inner)}
    return list(stateful.values())


def merges(metric: Any) -> bool:
    """Whether a metric synchronizes its state itself, by a method `merge_states`."""
    return callable(getattr(metric, "merge_states", None))


def is_without_state(metric: Any) -> bool:
    """Whether a metric has no variables: what it remembers is in Python attributes."""
    return not metric.variables and not merges(metric)


def rule_of(variable: Any) -> str:
    """How a variable is synchronized: "sum", "first" (rank's value) or "mean"."""
    aggregation = getattr(variable, "aggregation", "sum")
    return {"sum": "sum", "only_first_replica": "first"}.get(aggregation, "mean")


def exceptions(metrics: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Name and rule of each metric whose state is not summed, for the plan.

    It may be incomplete for a model that is not built: some metrics create their
    variables at the first batch.

    Args:
        metrics: `Model.metrics`, also of a model that is not built.
    """
    special = []
    for metric in stateful_metrics([*metrics, *_given_to_compile(metrics)]):
        rules = {rule_of(variable) for variable in metric.variables}
        if merges(metric):
            special.append((metric.name, "by its own merge_states"))
        elif "mean" in rules:
            special.append((metric.name, "state averaged by rows"))
        elif "first" in rules:
            special.append((metric.name, "the first rank's state"))
        elif not rules and not type(metric).__module__.startswith("keras."):
            # It may still create variables at the first batch, as some of Keras's own
            # metrics do.
            special.append(
                (metric.name, "result averaged by rows if without variables")
            )
    return tuple(special)


def _given_to_compile(metrics: Sequence[Any]) -> list[Any]:
    # `Model.metrics` lists them after the first batch only, and there is no public
    # attribute for them before.
    given = [
        getattr(metric, name, None) or []
        for metric in metrics
        for name in ("_user_metrics", "_user_weighted_metrics")
    ]
    leaves = keras.tree.flatten(given)
    return [leaf for leaf in leaves if isinstance(leaf, keras.metrics.Metric)]


def _inner(metric: Any) -> list[Any]:
    # Keras's container for the metrics of `compile` lists them in `metrics`. A metric
    # lists those among its attributes in `_metrics`; there is no public name for it.
    nested = [*_list(metric, "metrics"), *_list(metric, "_metrics")]
    return [inner for inner in nested if isinstance(inner, keras.metrics.Metric)]


def _list(metric: Any, name: str) -> list[Any]:
    value = getattr(metric, name, None)
    return list(value) if isinstance(value, (list, tuple)) else []


def _is_container(metric: Any) -> bool:
    """Whether it is Keras's container for the metrics of `compile`."""
    return isinstance(getattr(metric, "metrics", None), (list, tuple))
