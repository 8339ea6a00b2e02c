"""The state of a training: of the model, its callbacks and random generators."""

import contextlib
import copy
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.callbacks.average_statistics import variables_by_rule
from keras_dist.callbacks.broadcast_variables import state_variables
from keras_dist.callbacks.user_callbacks import runs_here
from keras_dist.checkpoint.files import digest, to_json
from keras_dist.data import draws
from keras_dist.optimizer.accumulation import pending_sums
from keras_dist.optimizer.nested import leaves_of
from keras_dist.training.metric_state import (
    MetricState,
    combine,
    combine_states,
    set_state,
)
from keras_dist.training.metrics import stateful_metrics, weights
from keras_dist.training.noise import StepNoise, set_keras_state
from keras_dist.training.session import session_of


def describe_model(model: Any) -> list[str]:
    """List the optimizers and shapes that a model must have to take a checkpoint."""
    variables = [f"{tuple(v.shape)} {v.dtype}" for v in state_variables(model)]
    return [type(leaf).__name__ for leaf in leaves_of(model)] + variables


def check_fits(model: Any, saved: list[str]) -> None:
    """Check that a checkpoint is of this model.

    Args:
        model: The built model.
        saved: The `describe_model` of the saved model.

    Raises:
        ValueError: If it is of another model, with the first difference.
    """
    pairs = itertools.zip_longest(describe_model(model), saved, fillvalue="nothing")
    for now, before in pairs:
        if now != before:
            raise ValueError(
                "The folder has checkpoints of another model. Received: a model whose "
                "optimizers or variables differ from the checkpoint: "
                f"{now} instead of {before}. Pass an empty folder to train this model "
                "from the beginning."
            )


def gather_ranks(model: Any, callbacks: dict[str, Any]) -> list[Any]:
    """Gather the state of each rank that differs from the first; all ranks call this.

    Args:
        model: The model.
        callbacks: State of each callback on this rank.
    """
    session, variables = session_of(model), state_variables(model)
    sums = {id(accumulator) for accumulator in pending_sums(model)}
    own = sums | {id(variable) for variable in model.non_trainable_weights}
    values = {
        str(index): comm.to_array(variable)
        for index, variable in enumerate(variables)
        if id(variable) in own
    }
    digests = {name: digest(value) for name, value in (values | callbacks).items()}
    first = comm.broadcast(digests)
    kept = {name for name, found in digests.items() if found != first.get(name)}
    kept |= {str(n) for n, variable in enumerate(variables) if id(variable) in sums}
    rows = session.rows_trained
    state = {
        "variables": {name: v for name, v in values.items() if name in kept},
        "callbacks": {name: v for name, v in callbacks.items() if name in kept},
        "random": to_json(random_state(session.traced.noise)),
        "metrics": [
            [comm.to_array(variable) for variable in part.variables]
            for part in stateful_metrics(model.metrics)
        ],
        "rows": rows,
        # One rank alone does not count for its metrics.
        "seen": session.traced.rows_seen.numpy().tolist()
        if comm.size() > 1
        else [0, rows, 0],
    }
    return comm.gather(state)


def set_rates(model: Any, rates: Sequence[Any]) -> list[Any]:
    """Set the saved rates of a model, perhaps not built; return the variables.

    A `MultiOptimizer` that is not built may have no inner optimizers.
    """
    variables = []
    for leaf, progress in zip(leaves_of(model), rates, strict=False):
        if isinstance(private.rate_of(leaf), keras.Variable):
            variables.append(private.rate_of(leaf))
            variables[-1].assign(progress["rate"])
    return variables


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
    if len(ranks) == comm.size():
        own = ranks[comm.rank()]
        for part, values in zip(pieces, own["metrics"], strict=True):
            set_state(part, MetricState(values))
        session.restore_rows(own["rows"], own["seen"])
        return
    steps, rows, last = zip(*(own["seen"] for own in ranks), strict=True)
    if comm.rank() == 0:
        for index, metric in enumerate(pieces):
            by_rank = [MetricState(own["metrics"][index]) for own in ranks]
            starts = [session.traced.starts.get(id(metric))] * len(ranks)
            combine_states(metric, by_rank, weights(rows), starts)
    # Statistics are weighted by these rows; the rate of the epoch is not.
    trained = sum(own["rows"] for own in ranks) // comm.size()
    seen = sum(rows) if comm.rank() == 0 else 0
    session.restore_rows(trained, [max(steps), seen, last[0]])


def merge_ranks(model: Any, ranks: Sequence[Any], starts: Sequence[Any]) -> None:
    """Merge, on the first rank, the variables that differ between the ranks.

    Args:
        model: The model, with the state of the first rank.
        ranks: The saved `gather_ranks` of each rank.
        starts: Values of summed variables when they were last synchronized.
    """
    by_rule, variables = variables_by_rule(model), state_variables(model)
    rule_by_id = {id(v): rule for rule, those in by_rule.items() for v in those}
    accumulated = {id(accumulator) for accumulator in pending_sums(model)}
    start_of = dict(zip(map(id, by_rule["sum"]), starts, strict=False))
    rows = np.array([own["rows"] for own in ranks], np.float64)
    differing = {int(index) for own in ranks for index in own["variables"]}
    for index, variable in enumerate(variables):
        rule = rule_by_id.get(id(variable), "first")
        # Ranks that have added the same number have equal values.
        if index not in differing and rule != "sum":
            continue
        first = comm.to_array(variable)
        values = [own["variables"].get(str(index), first) for own in ranks]
        if id(variable) in accumulated:
            variable.assign(sum(values))
        elif rule != "first" and rows.sum():
            fractions = rows / rows.sum()
            start = start_of.get(id(variable), 0)
            value = combine(rule, values, fractions, start)
            variable.assign(value.astype(first.dtype))


# Keras negates `min_delta` when it finds out that less is better. If it were restored,
# Keras would negate it again.
_NOT_STATE = ("params", "model", private.CALLBACK_MODEL, "min_delta")

# Attribute of a callback: the names of its attributes that a training has changed.
_TRAINED = "_keras_dist_trained"

# When this process began, by the clock of `time.monotonic` and `time.perf_counter`.
_BEGIN = time.monotonic_ns()


class CallbackStates:
    """Collects and restores the state of callbacks.

    The state of a callback with `state_dict` and `load_state_dict` is what these return
    and take. The state of any other callback is its attributes that are numbers, text,
    arrays, or lists and dicts of these, but only those that have changed since the
    training began, or in an earlier fit of the same object. So an argument that was
    changed in the script, such as a new `patience`, is not overwritten. Nor is a
    reading of `time.monotonic()` or `time.perf_counter()`, which means nothing in
    another process.

    Args:
        callbacks: All callbacks of a fit. Those that run on the first rank only are
            left out on other ranks.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        counts: Counter[str] = Counter()
        self._callbacks: dict[str, Any] = {}
        for callback in callbacks:
            name = type(callback).__name__
            counts[name] += 1
            if runs_here(callback):
                self._callbacks[f"{name} {counts[name]}"] = callback
        self._at_begin: dict[str, dict[str, bytes]] = {}

    def begin(self) -> None:
        """Note the states after `on_train_begin` of the callbacks."""
        for key, callback in self._callbacks.items():
            state = {} if _has_state_dict(callback) else _attributes(callback)
            self._at_begin[key] = {name: digest(state[name]) for name in state}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the states that `collect` returned, read from a file."""
        for key, callback in self._callbacks.items():
            if key not in saved:
                continue
            state = copy.deepcopy(saved[key])
            if "state_dict" in state and _has_state_dict(callback):
                callback.load_state_dict(state["state_dict"])
            for name, value in (changed := state.get("changed", {})).items():
                setattr(callback, name, value)
            _trained_names(callback).update(changed)

    def collect(self) -> dict[str, Any]:
        """Return the states of callbacks by class name and number, as JSON."""
        return {
            key: self._state_of(key, callback)
            for key, callback in self._callbacks.items()
        }

    def find(self, saved: dict[str, Any], kind: type) -> Any:
        """Return the saved `state_dict` of the callback of a class, `None` if none."""
        keys = [key for key, each in self._callbacks.items() if isinstance(each, kind)]
        return next((saved[k]["state_dict"] for k in keys if k in saved), None)

    def _state_of(self, key: str, callback: Any) -> Any:
        if _has_state_dict(callback):
            return {"state_dict": to_json(callback.state_dict())}
        at_begin, trained = self._at_begin[key], _trained_names(callback)
        state = _attributes(callback)
        trained.update(n for n, v in state.items() if at_begin.get(n) != digest(v))
        return {"changed": {n: v for n, v in state.items() if n in trained}}


def _has_state_dict(callback: Any) -> bool:
    """Return True if a callback has `state_dict` and `load_state_dict`."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(callback, name, None)) for name in names)


def _attributes(callback: Any) -> dict[str, Any]:
    """Attributes of a callback that a checkpoint can hold, as JSON."""
    attributes = {}
    for name, value in vars(callback).items():
        if name not in _NOT_STATE and not callable(value) and not _is_clock(value):
            with contextlib.suppress(TypeError, RecursionError):
                attributes[name] = to_json(value)
    return attributes


def _is_clock(value: Any) -> bool:
    """Return True for readings of this process's clock, and lists and dicts of them.

    A reading is between the start of the process and now, a multiple of a nanosecond,
    and has more digits than the float32 of a loss or metric.
    """
    if type(value) in (list, tuple, dict):
        parts = list(value.values() if type(value) is dict else value)
        return bool(parts) and all(map(_is_clock, parts))
    if type(value) is int:
        return _BEGIN <= value <= time.monotonic_ns()
    if type(value) is not float or not _BEGIN <= value * 1e9 <= time.monotonic_ns():
        return False
    return round(value * 1e9) / 1e9 == value != float(np.float32(value))


def _trained_names(callback: Any) -> set[str]:
    """Names of the attributes that a training has changed, in any fit of the object.

    The next fit begins with their values, but the next process does not.
    """
    names: set[str] = vars(callback).setdefault(_TRAINED, set())
    return names


def random_state(noise: StepNoise | None = None) -> dict[str, Any]:
    """Return the states of the generators of random numbers.

    Args:
        noise: What functions of Keras without a seed draw from in steps, if it counts.
    """
    states = {
        "keras": noise and noise.read_state(),
        "kernels": noise and noise.read_places(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "stash": draws.get_stash(),
    }
    # With op determinism TensorFlow has none until the user makes it.
    with contextlib.suppress(RuntimeError):
        states["tensorflow"] = tf.random.get_global_generator().state.numpy()
    return states


def restore_random(states: dict[str, Any], noise: StepNoise) -> None:
    """Set the generators to the states that `random_state` returned."""
    if states["keras"] is not None:
        set_keras_state(states["keras"])
    noise.set_places(states["kernels"] or ())
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    draws.set_stash(states["stash"])
    if "tensorflow" in states:
        with contextlib.suppress(RuntimeError, ValueError):  # another algorithm
            tf.random.get_global_generator().reset(states["tensorflow"])
