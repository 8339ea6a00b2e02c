"""State of a model on all ranks: what is the same everywhere, and what differs.

Weights and optimizer state are the same on all ranks, so a checkpoint has them once.
Some variables differ between ranks: statistics such as those of BatchNormalization
before the end of an epoch, accumulated gradients, layers that are not averaged, seeds
and metrics. A checkpoint has them for each rank. If a training is resumed on another
number of ranks, they are merged.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, optimizer
from keras_dist.callbacks.average_statistics import variables_by_rule
from keras_dist.checkpoint.trees import digest_of
from keras_dist.training.metrics.sync import (
    UpdateCounts,
    merges,
    rule_of,
    stateful_metrics,
    weights,
)
from keras_dist.training.session import session_of


def variables_of(model: Any) -> list[Any]:
    """Weights and optimizer state, in the same order on every rank."""
    variables = list(model.weights)
    for found in optimizer.optimizers_of(model):
        variables += found.variables
    return list({id(variable): variable for variable in variables}.values())


def num_bytes_of(model: Any) -> int:
    """Size in bytes of weights and optimizer state."""
    return sum(
        math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for variable in variables_of(model)
    )


def facts_of(model: Any) -> dict[str, Any]:
    """Layers, optimizers and shapes that a model must have to take a checkpoint."""
    return {
        "layers": [type(layer).__name__ for layer in getattr(model, "layers", [])],
        "optimizers": [leaf.__class__.__name__ for leaf in _leaves(model)],
        "variables": [
            f"{tuple(variable.shape)} {variable.dtype}"
            for variable in variables_of(model)
        ],
    }


def check_fits(model: Any, facts: dict[str, Any]) -> None:
    """Check that a checkpoint is of this model.

    Args:
        model: The built model.
        facts: The `facts_of` the saved model.

    Raises:
        ValueError: If it is of another model, with the first difference.
    """
    own = facts_of(model)
    for name, saved in facts.items():
        if saved != own[name]:
            before, now = _first_difference(saved, own[name])
            raise ValueError(
                "The folder has checkpoints of another model. Received: a model whose "
                f"{name} differ from the checkpoint: {now} instead of {before}. "
                "Pass an empty folder to train this model from the beginning."
            )


def own_state(model: Any) -> dict[str, Any]:
    """State of this rank that may differ from the first rank; all ranks call this."""
    variables = variables_of(model)
    own = _own_indices(model, variables)
    values = {str(index): array_of(variables[index]) for index in own}
    digests = {index: digest_of(value) for index, value in values.items()}
    of_first = comm.broadcast(digests)
    session = session_of(model)
    rows = session.rows_trained.total()
    return {
        "variables": {
            index: value
            for index, value in values.items()
            if digests[index] != of_first.get(index)
        },
        "seeds": [array_of(variable) for variable in _seeds(model)],
        "metrics": [
            [array_of(variable) for variable in part.variables]
            for part in stateful_metrics(model.metrics)
        ],
        "rows": rows,
        # One rank alone does not count for its metrics.
        "seen": session.rows_seen.counts() if comm.size() > 1 else [0, rows, 0],
    }


def restore_first(
    model: Any, arrays: Sequence[np.ndarray], ranks: Sequence[Any], starts: Any
) -> None:
    """Restore the state of the first rank, which is then broadcast to the others.

    Args:
        model: The built model.
        arrays: Weights and optimizer state of the first rank.
        ranks: The `own_state` of each rank.
        starts: `None` if the number of ranks is the same. Else values, at the beginning
            of the epoch, of the variables that are summed over the ranks.

    Raises:
        ValueError: If the number of ranks has changed and the model has layers that
            each rank trains for itself.
    """
    variables = variables_of(model)
    for variable, value in zip(variables, arrays, strict=True):
        variable.assign(value)
    for variable, value in zip(_seeds(model), ranks[0]["seeds"], strict=True):
        variable.assign(value)
    if starts is not None:
        _merge_ranks(model, variables, ranks, starts)


def rates_of(model: Any) -> list[dict[str, float]]:
    """How far each optimizer's learning rate has come."""
    return [optimizer.rate_progress(leaf) for leaf in _leaves(model)]


def restore_rates(model: Any, rates: Sequence[Any], warmup: float) -> None:
    """Continue the learning rate schedules, also on another number of ranks.

    Args:
        model: The model, whose optimizer state is restored.
        rates: The saved `rates_of`.
        warmup: Warm-up steps now, divided by the warm-up steps when it was saved.
    """
    for leaf, progress in zip(_leaves(model), rates, strict=True):
        optimizer.restore_rate_progress(leaf, progress, warmup)


def _leaves(model: Any) -> list[Any]:
    """The innermost optimizers of a model."""
    outermost = optimizer.optimizers_of(model)
    return [leaf for outer in outermost for leaf in optimizer.leaves(outer)]


def restore_own(model: Any, own: dict[str, Any]) -> None:
    """Restore the own state of this rank; the number of ranks must be the same."""
    variables = variables_of(model)
    for index, value in own["variables"].items():
        variables[int(index)].assign(value)
    for variable, value in zip(_seeds(model), own["seeds"], strict=True):
        variable.assign(value)


def restore_metrics(model: Any, ranks: Sequence[Any]) -> None:
    """Restore the metrics of the epoch so far.

    If the number of ranks is the same, each rank gets its own state back. Else the
    first rank gets the merged state of all ranks, and the others begin with none.

    Raises:
        ValueError: If the model has other metrics than the checkpoint.
    """
    pieces, session = stateful_metrics(model.metrics), session_of(model)
    shapes = [[tuple(v.shape) for v in part.variables] for part in pieces]
    if shapes != [[value.shape for value in part] for part in ranks[0]["metrics"]]:
        raise ValueError(
            "The training cannot be resumed in the middle of an epoch with other "
            f"metrics. Received: metrics with states of the shapes {shapes}, and a "
            "checkpoint with others. Compile the same metrics, or pass an empty folder."
        )
    is_same = len(ranks) == comm.size()
    own = ranks[comm.rank()] if is_same else _of_all(pieces, ranks)
    steps, rows, last = own["seen"]
    if is_same or comm.rank() == 0:
        for part, values in zip(pieces, own["metrics"], strict=True):
            for variable, value in zip(part.variables, values, strict=True):
                variable.assign(keras.ops.cast(value, variable.dtype))
    else:
        rows = 0
    session.rows_seen.restore([steps, rows, last])
    # Statistics are weighted by these rows; the rate of the epoch is not.
    rows_trained = own["rows"] if is_same else own["rows"] // comm.size()
    session.rows_trained.restore(rows_trained)


def array_of(variable: Any) -> np.ndarray:
    """A copy of a variable's value, which later steps do not change."""
    value = np.asarray(keras.ops.convert_to_numpy(variable))
    return value if value.flags.owndata else value.copy()


def _own_indices(model: Any, variables: Sequence[Any]) -> list[int]:
    """Indices of the variables that may differ between the ranks."""
    if optimizer.local_ids(model):
        return list(range(len(variables)))
    own = {id(variable) for variable in model.non_trainable_weights}
    own |= {id(variable) for variable in _accumulators(model)}
    return [index for index, variable in enumerate(variables) if id(variable) in own]


def _accumulators(model: Any) -> list[Any]:
    """Accumulated gradients that the next update will use."""
    return [
        accumulator
        for outer in optimizer.optimizers_of(model)
        if optimizer.is_between_updates(outer)
        for accumulator in outer._accumulated_gradients
    ]


def _seeds(model: Any) -> list[Any]:
    return [v for v in model.variables if v.name == "seed_generator_state"]


def _merge_ranks(
    model: Any, variables: Sequence[Any], ranks: Sequence[Any], starts: Any
) -> None:
    """Merge, on the first rank, the variables that differ between the ranks."""
    if optimizer.local_ids(model):
        raise ValueError(
            "A model with layers that each rank trains for itself cannot be resumed on "
            f"another number of ranks. Received: {len(ranks)} ranks before and "
            f"{comm.size()} now. Start {len(ranks)} ranks, or pass an empty folder."
        )
    by_rule = variables_by_rule(model)
    rule_by_id = {id(v): rule for rule, those in by_rule.items() for v in those}
    rule_by_id |= dict.fromkeys(map(id, _accumulators(model)), "accumulated")
    start_of = dict(zip(map(id, by_rule["sum"]), starts, strict=False))
    rows = np.array([own["rows"] for own in ranks], np.float64)
    for index in {index for own in ranks for index in own["variables"]}:
        variable = variables[int(index)]
        first = array_of(variable)
        values = [own["variables"].get(index, first) for own in ranks]
        rule = rule_by_id.get(id(variable), "first")
        if rule == "accumulated":
            variable.assign(sum(values) / comm.size())
        elif rule == "sum":
            start = start_of.get(id(variable), 0)
            variable.assign(start + sum(value - start for value in values))
        elif rule == "mean" and rows.sum():
            wide = [value.astype(np.float64) for value in values]
            mean = np.tensordot(rows / rows.sum(), wide, axes=1)
            variable.assign(mean.astype(first.dtype))


def _of_all(metrics: Sequence[Any], ranks: Sequence[Any]) -> dict[str, Any]:
    """The own states of all ranks, merged into that of one rank."""
    seen = [UpdateCounts(own["seen"][1], own["seen"][0]) for own in ranks]
    fractions = weights(seen)
    merged = []
    for index, metric in enumerate(metrics):
        values = [own["metrics"][index] for own in ranks]
        if merges(metric):
            if comm.rank() == 0:
                metric.merge_states(values)
            merged.append([array_of(variable) for variable in metric.variables])
            continue
        merged.append(
            [
                _merged(rule_of(variable), per_rank, fractions)
                for variable, *per_rank in zip(metric.variables, *values, strict=True)
            ]
        )
    return {
        "metrics": merged,
        "rows": sum(own["rows"] for own in ranks),
        "seen": [
            max(own["seen"][0] for own in ranks),
            sum(own["seen"][1] for own in ranks),
            ranks[0]["seen"][2],
        ],
    }


def _merged(rule: str, values: Sequence[np.ndarray], fractions: Sequence[float]) -> Any:
    if rule == "first":
        return values[0]
    if rule == "sum":
        return sum(values[1:], values[0])
    return sum(
        value * fraction for value, fraction in zip(values, fractions, strict=True)
    )


def _first_difference(before: Sequence[Any], now: Sequence[Any]) -> tuple[Any, Any]:
    for old, new in zip(before, now, strict=False):
        if old != new:
            return old, new
    return f"{len(before)} of them", f"{len(now)}"
