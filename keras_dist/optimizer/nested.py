"""Find the optimizers of a model, and the optimizers inside another one."""

import contextlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import keras

from keras_dist import mixin, private

# Nobody keeps optimizers in a longer list; a user's data may be in one.
_LONGEST = 1000

# Looked at so many objects, nearest to the model first, the search ends.
_MOST = 10_000

# Objects of these packages hold no optimizers, but for models.
_NOT_SEARCHED = {"builtins", "keras", "keras_dist", "numpy", "tensorflow"}

# Keras has it from 3.14 on.
_MULTI = getattr(keras.optimizers, "MultiOptimizer", ())


def optimizers_of(model: Any) -> list[Any]:
    """Find the compiled optimizer, and all others that `model` keeps, each once.

    Optimizers of a custom train step may be attributes of the model, or be in lists,
    tuples and dicts, in objects of the user's own and in models and layers inside. All
    ranks find them in the same order: attributes first, in the order in which they were
    set. A set has no order that is the same on all ranks, and is not searched.

    Args:
        model: A `keras.Model`.
    """
    return _find_optimizers(model, _may_hold_optimizers)


def _find_optimizers(owner: Any, is_searched: Callable[[Any], bool]) -> list[Any]:
    found: dict[int, Any] = {}
    seen = {id(owner)}
    waiting = deque([owner])
    while waiting and len(seen) < _MOST:
        for value in _held_by(waiting.popleft()):
            if isinstance(value, keras.optimizers.Optimizer):
                found[id(value)] = value
            elif id(value) not in seen and is_searched(value):
                seen.add(id(value))
                waiting.append(value)
    return list(found.values())


def _is_short_container(value: Any) -> bool:
    is_container = isinstance(value, (list, tuple, deque, Mapping))
    return is_container and 0 < len(value) <= _LONGEST


def _may_hold_optimizers(value: Any) -> bool:
    if _is_short_container(value) or isinstance(value, keras.Model):
        return True
    others = list, tuple, deque, Mapping, type, types.ModuleType, types.FunctionType
    if isinstance(value, others):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in _NOT_SEARCHED


def _held_by(value: Any) -> Iterable[Any]:
    """List what is in a container, or the attributes of an object."""
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    members = (vars(cls).items() for cls in type(value).__mro__)
    in_slots = []
    for _, member in chain(*members):
        if isinstance(member, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # it has no value yet
                in_slots.append(member.__get__(value))
    return [*getattr(value, "__dict__", {}).values(), *in_slots]


def inner_optimizers(optimizer: Any) -> list[Any]:
    """List the optimizers directly inside one: its attributes, also in containers.

    A `LossScaleOptimizer` has one, and so has a wrapper of the user's. A
    `MultiOptimizer` has several, and may make them only when it is built.
    """
    return _find_optimizers(optimizer, _is_short_container)


def nested_optimizers(optimizer: Any) -> list[Any]:
    """List `optimizer` and all those inside it, outermost first, each once."""
    return _follow(optimizer, inner_optimizers)


def leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers that update variables; their rate is the one to scale.

    An optimizer with others inside and an `apply` or `apply_gradients` of its own, as
    those of Keras have it, lets the inner ones update: a rate that it has, too, is not
    scaled. Without such a method, it makes the updates, at its own rate: it is its own
    leaf.
    """
    found = _follow(optimizer, _list_delegates)
    return [o for o in found if not (_list_delegates(o) or isinstance(o, _MULTI))]


def leaves_of(model: Any) -> list[Any]:
    """Return the leaves of all optimizers of a model."""
    return [leaf for outer in optimizers_of(model) for leaf in leaves(outer)]


def _list_delegates(optimizer: Any) -> list[Any]:
    """List the inner optimizers whose `apply` this one calls."""
    return inner_optimizers(optimizer) if changes_updates(optimizer) else []


def changes_updates(optimizer: Any) -> bool:
    """Return True if a class has another `apply` or `apply_gradients` than Keras's."""
    plain = keras.optimizers.Optimizer.__mro__
    owners = (mixin.find_owner(optimizer, n) for n in ("apply", "apply_gradients"))
    return any(owner not in plain for owner in owners)


def _follow(optimizer: Any, step: Callable[[Any], list[Any]]) -> list[Any]:
    found = [optimizer]
    for part in found:  # which grows
        found += [one for one in step(part) if all(one is not o for o in found)]
    return found


def state_of(optimizer: Any) -> list[Any]:
    """List the variables of an optimizer and of those inside it, each once."""
    variables = [v for part in nested_optimizers(optimizer) for v in part.variables]
    return list({id(v): v for v in variables}.values())


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make the state of an optimizer, and of those that it would build when it updates.

    A `MultiOptimizer` builds those that it uses.
    """
    parts = nested_optimizers(optimizer)
    chosen = {id(o) for p in parts if isinstance(p, _MULTI) for o in p.optimizers}
    for part in parts:
        if not part.built and id(part) not in chosen:
            part.build(variables)


def variables_of(optimizer: Any, variables: Sequence[Any] | None) -> list[Any]:
    """Return the variables of an update: by default all of the optimizer."""
    if variables is None:
        return private.trainable_variables_of(optimizer)
    return list(variables)
