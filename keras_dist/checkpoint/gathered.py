"""The state of all ranks, gathered to be the content of one checkpoint."""

from dataclasses import dataclass
from typing import Any

from keras_dist import comm
from keras_dist.checkpoint import model_states, random_states
from keras_dist.checkpoint.trees import digest_of


@dataclass(frozen=True)
class Gathered:
    """What a checkpoint has of all ranks, equal on each rank that writes.

    Args:
        callbacks: State of each callback on the first rank.
        ranks: For each rank, the state that differs from the first rank's.
        arrays: Weights and optimizer state of the first rank; empty on ranks that do
            not write.
        failures: For each rank, its error when it wrote the checkpoint before, or "".
    """

    callbacks: dict[str, Any]
    ranks: list[Any]
    arrays: list[Any]
    failures: list[str]


def gathered(
    model: Any,
    states: dict[str, Any],
    *,
    failure: str,
    is_writer: bool,
    are_several: bool,
) -> Gathered:
    """Gather the state of all ranks; all ranks call this.

    Args:
        model: The model.
        states: State of each callback on this rank.
        failure: The error of this rank when it wrote the checkpoint before, or "".
        is_writer: Whether this rank writes.
        are_several: Whether other ranks than the first one write.
    """
    own = model_states.own_state(model)
    own["random"] = random_states.collected()
    first = comm.broadcast({key: digest_of(state) for key, state in states.items()})
    own["callbacks"] = {
        key: state
        for key, state in states.items()
        if digest_of(state) != first.get(key)
    }
    absent = [key for key in first if key not in states]
    per_rank = comm.gather((own, absent, failure))
    ranks = [state for state, _, _ in per_rank]
    variables = model_states.variables_of(model)
    replaced: dict[int, Any] = {}
    if are_several:
        asked = {key for _, keys, _ in per_rank for key in keys}
        asked |= {key for state in ranks for key in state["callbacks"]}
        given = comm.broadcast({key: states[key] for key in asked & states.keys()})
        states = {key: given[key] if key in given else states[key] for key in first}
        replaced = _of_first(variables, ranks)
    arrays = [
        replaced[index] if index in replaced else model_states.array_of(variable)
        for index, variable in enumerate(variables if is_writer else [])
    ]
    return Gathered(states, ranks, arrays, [error for _, _, error in per_rank])


def _of_first(variables: list[Any], ranks: list[Any]) -> dict[int, Any]:
    """The first rank's values of variables that differ on some rank, by index."""
    indices = sorted({int(index) for state in ranks for index in state["variables"]})
    arrays = [model_states.array_of(variables[index]) for index in indices]
    return dict(zip(indices, comm.broadcast_arrays(arrays, 0), strict=True))
