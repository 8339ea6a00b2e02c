"""Find the optimizers of a model, and the optimizers inside another one."""

import contextlib
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import keras

from keras_dist import private

# Nobody keeps optimizers in a longer list; a user's data may be in one.
_LONGEST = 1000

# Looked at so many objects, nearest to the model first, the search ends.
_MOST = 10_000

# Objects of these packages hold no optimizers, but for models.
_NOT_SEARCHED = {"builtins", "keras", "keras_dist", "numpy", "tensorflow"}


def optimizers_of(model: Any) -> list[Any]:
    """Find the compiled optimizer, and all others that `model` keeps, each once.

    Optimizers of a custom train step may be attributes of the model, or be in lists,
    tuples and dicts, in objects of the user's own and in models and layers inside. All
    ranks find them in the same order: attributes first, in the order in which they were
    set. A set has no order that is the same on all ranks, and is not searched.

    Args:
        model: A `keras.Model`.
    """
    found: dict[int, Any] = {}
    seen = {id(model)}
    waiting = deque([model])
    while waiting and len(seen) < _MOST:
        for value in _held_by(waiting.popleft()):
            if isinstance(value, keras.optimizers.Optimizer):
                found[id(value)] = value
            elif id(value) not in seen and _may_hold_optimizers(value):
                seen.add(id(value))
                waiting.append(value)
    return list(found.values())


def _may_hold_optimizers(value: Any) -> bool:
    if isinstance(value, (list, tuple, deque, Mapping)):
        return 0 < len(value) <= _LONGEST
    if isinstance(value, keras.Model):
        return True
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
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


def leaves(optimizer: Any) -> list[Any]:
    """Return the innermost optimizers, which update variables and have a rate.

    A `LossScaleOptimizer` has one inside, and a `MultiOptimizer` several, which it may
    make only when it is built. Every other optimizer is its own leaf.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return leaves(inner)
    # Keras has it from 3.14 on.
    multi = getattr(keras.optimizers, "MultiOptimizer", ())
    return list(optimizer.optimizers) if isinstance(optimizer, multi) else [optimizer]


def nested_optimizers(optimizer: Any) -> list[Any]:
    """`optimizer` and those inside it (of a `LossScaleOptimizer`), outermost first."""
    found = [optimizer]
    while (inner := getattr(found[-1], "inner_optimizer", None)) is not None:
        found.append(inner)
    return found


def variables_of(optimizer: Any, variables: Sequence[Any] | None) -> list[Any]:
    """Return the variables of an update: by default all of the optimizer."""
    if variables is None:
        return private.trainable_variables_of(optimizer)
    return list(variables)
