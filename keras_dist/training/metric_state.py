"""The state of one metric, in variables and in Python, over the rows of several ranks.

A rank's state is what has come since Keras reset the metric. Variables are combined by
their `aggregation`. What a metric keeps in Python has no such rule: numbers and arrays
are added up, and lists are joined, as metrics use them; the trial of a step compares
the result. Anything else that has changed cannot be combined, which is an error.
"""

import contextlib
import io
import pickle
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.training.remember import preserve_variables

# What is no state of a metric, whatever changes in it.
_NO_STATE = types.FunctionType, types.MethodType, types.ModuleType, type
_NO_STATE += keras.Layer, keras.metrics.Metric, keras.losses.Loss  # type: ignore

# Keras and TensorFlow have classes of what is.
_STATE = Mapping, list, tuple, set, tf.Variable, tf.__internal__.EagerTensor

_OF_KERAS = set(vars(keras.metrics.Metric(name="any")))
_NONE = pickle.dumps(None)

_ADVICE = (
    "Keep it in variables (`add_variable`), in numbers and arrays that sum over rows, "
    "or in lists of rows."
)


@dataclass(frozen=True)
class MetricState:
    """The state of a metric on one rank.

    Args:
        arrays: The values of its variables.
        attributes: What it keeps in Python, by name, pickled; of a metric of Keras,
            nothing.
    """

    arrays: Sequence[np.ndarray]
    attributes: Mapping[str, bytes] = field(default_factory=dict)

    def leave_out(self, start: "MetricState | None") -> "MetricState":
        """Return this state without what has not changed since `start`, in Python."""
        begun = self.attributes if start is None else start.attributes
        own = self.attributes.items()
        return replace(self, attributes={n: v for n, v in own if v != begun.get(n)})


@dataclass(frozen=True)
class _Opaque:
    """Stands for an object that cannot be combined, by what it holds."""

    name: str
    content: bytes

    def __repr__(self) -> str:
        return f"an object of the class {self.name}"


def read_state(metric: Any) -> MetricState:
    """Copy the state of a metric."""
    attributes = {
        name: _pickle(value)
        for name, value in vars(metric).items()
        if not (is_of_keras(metric) or name in _OF_KERAS or _is_no_state(value))
    }
    return MetricState(list(map(comm.to_array, metric.variables)), attributes)


def is_of_keras(metric: Any) -> bool:
    """Return True for a metric of Keras: it has variables alone, which begin at 0."""
    return type(metric).__module__.startswith("keras.")


def record_starts(
    metrics: Sequence[Any],
    recorded: Mapping[int, MetricState],
    before: Mapping[int, MetricState],
) -> dict[int, MetricState]:
    """Return the states in which metrics of the user's have begun, by the metric's id.

    Args:
        metrics: The metrics, which were reset just now.
        recorded: What this has returned at the reset before.
        before: The states before this reset. What it has not changed has the start
            that was recorded: it counts over all epochs.
    """
    starts = {}
    for metric in metrics:
        start, key = read_state(metric), id(metric)
        if key in recorded and key in before:
            old, kept = recorded[key], before[key]
            rows = zip(start.arrays, kept.arrays, old.arrays, strict=True)
            changed = start.leave_out(kept).attributes
            start = MetricState(
                [first if np.array_equal(now, b) else now for now, b, first in rows],
                {**start.attributes, **old.attributes, **changed},
            )
        starts[key] = start
    return starts


@contextlib.contextmanager
def preserve_metrics(metrics: Sequence[Any]) -> Iterator[None]:
    """Context manager that gives metrics back the state that they have now."""
    variables = [variable for metric in metrics for variable in metric.variables]
    before = [(metric, dict(vars(metric))) for metric in metrics]
    try:
        with preserve_variables(variables):
            yield
    finally:
        for metric, attributes in before:
            vars(metric).clear()
            vars(metric).update(attributes)


def set_state(metric: Any, state: MetricState) -> None:
    """Give a metric a state; what cannot be copied stays as it is."""
    for variable, value in zip(metric.variables, state.arrays, strict=True):
        variable.assign(value)
    for name, pickled in state.attributes.items():
        value = pickle.loads(pickled)
        if not _has_opaque(value):
            vars(metric)[name] = value


def combine_states(
    metric: Any,
    states: Sequence[MetricState],
    fractions: Sequence[float],
    starts: Sequence[MetricState | None],
) -> None:
    """Give a metric the state over the rows of several ranks: see `combine`.

    Args:
        metric: The metric.
        states: That of each rank; attributes as at the start may be left out.
        fractions: Of all rows, each rank's.
        starts: The state in which each rank began; `None` for zeros.

    Raises:
        ValueError: If it keeps in Python what cannot be combined.
    """
    for name in sorted({name for state in states for name in state.attributes}):
        given = [start.attributes.get(name, _NONE) for start in starts if start]
        values = [
            pickle.loads(state.attributes.get(name, given[0])) for state in states
        ]
        try:
            _check(len(set(given)) == 1, "another value on each rank at the reset")
            merged = _merge(pickle.loads(given[0]), values)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"The metric {metric.name!r} ({type(metric).__name__}) keeps a state "
                "outside of its variables that cannot be combined over the ranks. "
                f"Received: the attribute `{name}`: {error}. {_ADVICE}"
            ) from None
        vars(metric)[name] = merged  # untracked by Keras
    arrays = [state.arrays for state in states]
    if merges(metric):
        metric.merge_states(arrays)
        return
    for index, variable in enumerate(metric.variables):
        begun = [start.arrays[index] for start in starts if start] or [np.zeros(())]
        # What differs counts from 0, over all epochs.
        is_alike = all(np.array_equal(begun[0], other) for other in begun)
        values = [own[index] for own in arrays]
        rule, start = rule_of(variable), begun[0] if is_alike else 0
        value = combine(rule, values, fractions, start)
        if value.dtype.kind == "f" and keras.backend.is_int_dtype(variable.dtype):
            value = np.rint(value)  # an average of integers
        variable.assign(keras.ops.cast(value, variable.dtype))


def merges(metric: Any) -> bool:
    """Return True if a metric synchronizes its state itself, by `merge_states`."""
    return callable(getattr(metric, "merge_states", None))


def rule_of(variable: Any) -> str:
    """Name the rule of a variable: "sum", "first" (rank's value) or "mean"."""
    aggregation = getattr(variable, "aggregation", "sum")
    return {"sum": "sum", "only_first_replica": "first"}.get(aggregation, "mean")


def combine(
    rule: str,
    values: Sequence[np.ndarray],
    fractions: Sequence[float],
    start: Any = 0,
) -> np.ndarray:
    """Combine the values that a variable has on several ranks.

    Args:
        rule: See `rule_of`.
        values: One of each rank.
        fractions: Of all rows that the ranks have seen.
        start: The value that all ranks had before; a sum is one of what came since.

    Returns:
        int64 for sums of integers, which are exact; float64 for sums of other numbers,
        and for means.
    """
    # Of ranks that have seen rows. Infinity × 0 would be NaN.
    pairs = [pair for pair in zip(values, fractions, strict=True) if pair[1]]
    if rule == "first":
        return pairs[0][0]
    if rule == "sum":
        dtype = np.int64 if values[0].dtype.kind in "iub" else np.float64
        start = np.asarray(start).astype(dtype)
        with np.errstate(invalid="ignore"):  # a maximum begins at -infinity
            terms = [value.astype(dtype) - start for value in values]
            return start + np.sum(terms, axis=0)
    terms = [np.asarray(value, np.float64) * fraction for value, fraction in pairs]
    return np.sum(terms, axis=0)


def _pickle(value: Any) -> bytes:
    try:
        return pickle.dumps(_copy(value))
    except Exception:  # a key that cannot be pickled
        return pickle.dumps(_Opaque(type(value).__name__, b""))


def _copy(value: Any) -> Any:
    if isinstance(value, tf.__internal__.EagerTensor):
        value = comm.to_array(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    if value is None or isinstance(value, (bool, int, float, complex, np.generic)):
        return value
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return set(value)
    if isinstance(value, deque):
        return deque(map(_copy, value), value.maxlen)
    if isinstance(value, (list, tuple)):
        copies = map(_copy, value)
        return list(copies) if isinstance(value, list) else tuple(copies)
    content = io.BytesIO()
    with contextlib.suppress(Exception):  # a lock, or an open file
        _Pickler(content).dump(value)
    return _Opaque(type(value).__name__, content.getvalue())


class _Pickler(pickle.Pickler):
    """Writes what an object holds, but for what is no state of a metric."""

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, tf.Variable | tf.__internal__.EagerTensor):
            return repr(comm.to_array(value).tobytes())
        return "" if _is_no_state(value) else None


def _is_no_state(value: Any) -> bool:
    """Return True for what is no state; Keras and TensorFlow have classes that are."""
    is_ours = type(value).__module__.partition(".")[0] not in ("keras", "tensorflow")
    return isinstance(value, _NO_STATE) or not (is_ours or isinstance(value, _STATE))


def _has_opaque(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, deque)):
        return any(map(_has_opaque, value))
    return isinstance(value, _Opaque)


def _merge(start: Any, values: Sequence[Any]) -> Any:
    """Combine the values that several ranks have of what began as `start`.

    Raises:
        ValueError: If they cannot be combined.
    """
    known = pickle.dumps(start)
    values = [value for value in values if pickle.dumps(value) != known]
    if not values:
        return start
    one = values[0]
    if isinstance(one, Mapping):
        start = {} if start is None else start
        _check(all(start.keys() <= value.keys() for value in values), "lost keys")
        keys = dict.fromkeys(key for value in values for key in value)
        return {k: _merge(start.get(k), [v[k] for v in values if k in v]) for k in keys}
    if isinstance(one, set):
        start = start or set()
        _check(all(start <= value for value in values), "lost elements")
        return start.union(*values)
    if isinstance(one, (list, tuple, deque)):
        return _join(type(one)() if start is None else start, values)
    if isinstance(one, np.ndarray) and np.shape(start) != one.shape:
        begins = [value[: len(start)] for value in values]
        _check(all(np.array_equal(start, begin) for begin in begins), "lost entries")
        return np.concatenate([start, *(value[len(start) :] for value in values)])
    kind = np.asarray(one).dtype.kind
    if kind in "iufc":
        start = 0 if start is None else start
        return start + sum(value - start for value in values)
    is_flag = kind == "b" and all(_is_same(value, one) for value in values)
    _check(is_flag or one is None, f"{one!r:.60}")
    return one


def _join(start: Any, values: Sequence[Any]) -> Any:
    """Join sequences that began alike; or add up those whose lengths are fixed."""
    count, kind = len(start), type(start)
    if kind is not deque and count and all(len(value) == count for value in values):
        return kind(map(_merge, start, zip(*values, strict=True)))
    parts = list(map(list, values))
    is_kept = all(_is_same(part[:count], list(start)) for part in parts)
    _check(is_kept, "lost entries")
    added = [entry for part in parts for entry in part[count:]]
    _check(not _has_opaque(added), f"{added!r:.60}")
    most = getattr(values[0], "maxlen", None)
    _check(most is None or count + len(added) <= most, f"more than {most} entries")
    return kind([*start, *added])


def _check(is_right: Any, received: str) -> None:
    if not is_right:
        raise ValueError(received)


def _is_same(one: Any, other: Any) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)
