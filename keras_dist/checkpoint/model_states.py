"""The state of a model on all ranks: what is equal, and what each has of its own."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, optimizer
from keras_dist.callbacks.average_statistics import variables_by_rule
from keras_dist.checkpoint.trees import digest_of
from keras_dist.metrics import states
from keras_dist.metrics.rank_report import Seen
from keras_dist.metrics.stateful import merges, rule_of, stateful_metrics
from keras_dist.training.session import session_of


def variables_of(model: Any) -> list[Any]:
    """Weights and the optimizers' state, in an order that follows from the model."""
    variables = list(model.weights)
    for found in optimizer.optimizers_of(model):
        variables += found.variables
    return list({id(variable): variable for variable in variables}.values())


def num_bytes_of(model: Any) -> int:
    """What they take."""
    return sum(
        math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for variable in variables_of(model)
    )


def facts_of(model: Any) -> dict[str, Any]:
    """What a model must be, for its state to fit."""
    return {
        "layers": [type(layer).__name__ for layer in getattr(model, "layers", [])],
        "optimizers": [leaf.__class__.__name__ for leaf in _leaves(model)],
        "variables": [
            f"{tuple(variable.shape)} {variable.dtype}"
            for variable in variables_of(model)
        ],
    }


def check_fits(model: Any, facts: dict[str, Any]) -> None:
    """Raise where a checkpoint is of another model.

    Raises:
        ValueError: With the first thing in which they differ.
    """
    own = facts_of(model)
    for name, saved in facts.items():
        if saved != own[name]:
            before, now = _first_difference(saved, own[name])
            raise ValueError(
                "The folder holds checkpoints of another model. Received: a model "
                f"whose {name} differ from theirs, {now} where they have {before}. "
                "Pass an empty folder to train this one from the beginning."
            )


def own_state(model: Any) -> dict[str, Any]:
    """What this rank has of its own; called by all ranks together."""
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
    """Give the first rank its state, which is then copied to the others.

    Args:
        model: The built model.
        arrays: What the first rank held.
        ranks: What each rank had of its own.
        starts: Values from which variables that are added up have begun, where the
            number of ranks is another one now; else `None`.

    Raises:
        ValueError: If layers that each rank trains for itself were on other ranks.
    """
    variables = variables_of(model)
    for variable, value in zip(variables, arrays, strict=True):
        variable.assign(value)
    for variable, value in zip(_seeds(model), ranks[0]["seeds"], strict=True):
        variable.assign(value)
    if starts is not None:
        _merge_ranks(model, variables, ranks, starts)


def rates_of(model: Any) -> list[dict[str, float]]:
    """How far the learning rate of each optimizer has come."""
    return [optimizer.position_of(leaf) for leaf in _leaves(model)]


def restore_rates(model: Any, rates: Sequence[Any], warmup: float) -> None:
    """Let them go on where another number of ranks has left them.

    Args:
        model: With its optimizers' state restored.
        rates: What `rates_of` said then.
        warmup: Steps of the warm-up now, over those of then.
    """
    for leaf, position in zip(_leaves(model), rates, strict=True):
        optimizer.go_on(leaf, position, warmup)


def _leaves(model: Any) -> list[Any]:
    found = optimizer.optimizers_of(model)
    return [leaf for outer in found for leaf in optimizer.leaves(outer)]


def restore_own(model: Any, own: dict[str, Any]) -> None:
    """Give this rank what was its own, on as many ranks as there were."""
    variables = variables_of(model)
    for index, value in own["variables"].items():
        variables[int(index)].assign(value)
    for variable, value in zip(_seeds(model), own["seeds"], strict=True):
        variable.assign(value)


def restore_metrics(model: Any, ranks: Sequence[Any]) -> None:
    """Give this rank what its metrics have seen of the epoch so far.

    On as many ranks as there were, each has its own again. On others, the first rank
    has what all had.

    Raises:
        ValueError: If these are other metrics.
    """
    pieces, session = stateful_metrics(model.metrics), session_of(model)
    shapes = [[tuple(v.shape) for v in part.variables] for part in pieces]
    if shapes != [[value.shape for value in part] for part in ranks[0]["metrics"]]:
        raise ValueError(
            "The training cannot go on in the middle of an epoch with other metrics. "
            f"Received: metrics with states of the shapes {shapes}, and a checkpoint "
            "with others. Compile the same metrics, or pass an empty folder."
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
    """Places of the variables that need not be equal on all ranks."""
    if optimizer.local_ids(model):
        return list(range(len(variables)))
    own = {id(variable) for variable in model.non_trainable_weights}
    own |= {id(variable) for variable in _accumulators(model)}
    return [index for index, variable in enumerate(variables) if id(variable) in own]


def _accumulators(model: Any) -> list[Any]:
    return [
        accumulator
        for found in optimizer.optimizers_of(model)
        if optimizer.is_between_updates(found)
        for accumulator in found._accumulated_gradients
    ]


def _seeds(model: Any) -> list[Any]:
    return [v for v in model.variables if v.name == "seed_generator_state"]


def _merge_ranks(
    model: Any, variables: Sequence[Any], ranks: Sequence[Any], starts: Any
) -> None:
    """On the first rank, what other ranks have held of variables that differed."""
    if optimizer.local_ids(model):
        raise ValueError(
            "Layers that each rank trains for itself cannot go on with another number "
            f"of ranks. Received: {len(ranks)} ranks before and {comm.size()} now."
        )
    by_rule = variables_by_rule(model)
    rule_by_id = {id(v): rule for rule, found in by_rule.items() for v in found}
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


def _of_all(pieces: Sequence[Any], ranks: Sequence[Any]) -> dict[str, Any]:
    """What all ranks have seen together, as one rank holds it."""
    seen = [Seen(own["seen"][1], own["seen"][0]) for own in ranks]
    fractions = states.weights(seen)
    merged = []
    for index, part in enumerate(pieces):
        values = [own["metrics"][index] for own in ranks]
        if merges(part):
            if comm.rank() == 0:
                part.merge_states(values)
            merged.append([array_of(variable) for variable in part.variables])
            continue
        merged.append(
            [
                _merged(rule_of(variable), held, fractions)
                for variable, *held in zip(part.variables, *values, strict=True)
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


def _merged(rule: str, held: Sequence[np.ndarray], fractions: Sequence[float]) -> Any:
    if rule == "first":
        return held[0]
    if rule == "sum":
        return sum(held[1:], held[0])
    return sum(
        value * fraction for value, fraction in zip(held, fractions, strict=True)
    )


def _first_difference(before: Sequence[Any], now: Sequence[Any]) -> tuple[Any, Any]:
    for old, new in zip(before, now, strict=False):
        if old != new:
            return old, new
    return f"{len(before)} of them", f"{len(now)}"
