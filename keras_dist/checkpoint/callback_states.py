"""State of callbacks: best values, counters, histories."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import comm
from keras_dist.callbacks import runs_on_first_rank_only
from keras_dist.checkpoint.trees import decoded, digest_of, encoded

# Keras negates `min_delta` when it finds out that less is better. If it were restored,
# Keras would negate it again.
_NOT_STATE = ("params", "model", "_model", "min_delta")


class CallbackStates:
    """Collects and restores the state of callbacks.

    The state of a callback with `state_dict` and `load_state_dict` is what these return
    and take. The state of any other callback is its attributes that are numbers, text,
    arrays, or lists and dicts of these, but only those that have changed since the
    training began. So an argument that was changed in the script, such as a new
    `patience`, is not overwritten.

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
            if comm.rank() == 0 or not runs_on_first_rank_only(callback):
                self._callbacks[f"{name} {counts[name]}"] = callback
        self._at_begin: dict[str, dict[str, bytes]] = {}

    def begin(self, saved: dict[str, Any]) -> None:
        """Restore the saved states, after `on_train_begin` of the callbacks.

        Args:
            saved: States of `collected`, by key.
        """
        for key, callback in self._callbacks.items():
            own = {} if _has_state_dict(callback) else _attributes(callback)
            self._at_begin[key] = {name: digest_of(own[name]) for name in own}
            if key in saved:
                _restore(callback, saved[key])

    def collected(self) -> dict[str, Any]:
        """The states of the callbacks as trees, by the class name and a number."""
        return {
            key: self._state_of(key, callback)
            for key, callback in self._callbacks.items()
        }

    def _state_of(self, key: str, callback: Any) -> Any:
        if _has_state_dict(callback):
            return {"said": encoded(callback.state_dict())}  # a name in the file format
        at_begin = self._at_begin[key]
        own = _attributes(callback)
        changed = {n: t for n, t in own.items() if at_begin.get(n) != digest_of(t)}
        return {"changed": changed}


def _has_state_dict(callback: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(callback, name, None)) for name in names)


def _attributes(callback: Any) -> dict[str, Any]:
    """Attributes of a callback that a checkpoint can hold, as trees."""
    attributes = {}
    for name, value in vars(callback).items():
        if name not in _NOT_STATE and not callable(value):
            try:
                attributes[name] = encoded(value)
            except TypeError:
                continue
    return attributes


def _restore(callback: Any, state: Any) -> None:
    if "said" in state and _has_state_dict(callback):
        callback.load_state_dict(decoded(state["said"]))
    for name, tree in state.get("changed", {}).items():
        setattr(callback, name, decoded(tree))


def with_history(callbacks: Sequence[Any]) -> list[Any]:
    """Add a `History` if there is none, so that it stands before our own callback.

    Keras would add it at the end of the list, behind the callback that saves.
    """
    if any(isinstance(callback, keras.callbacks.History) for callback in callbacks):
        return list(callbacks)
    return [*callbacks, keras.callbacks.History()]
