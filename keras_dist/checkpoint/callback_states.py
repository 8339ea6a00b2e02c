"""What callbacks remember from epoch to epoch: best values, counters, histories."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import comm
from keras_dist.callbacks import runs_on_first_rank_only
from keras_dist.checkpoint.trees import decoded, digest_of, encoded

# Keras turns the sign of `min_delta` when it finds out whether less is better, and
# would turn it again.
_NOT_STATE = ("params", "model", "_model", "min_delta")


class CallbackStates:
    """Collects and gives back the state of callbacks.

    Of a callback with `state_dict` and `load_state_dict`, what these say. Of any other,
    the attributes that are numbers, text, arrays, or lists and dicts of these, and that
    have changed since the training began: so a new `patience` in the script counts.

    Args:
        callbacks: All of a fit. Those that run on the first rank only count there.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        seen: Counter[str] = Counter()
        self._callbacks: dict[str, Any] = {}
        for callback in callbacks:
            name = type(callback).__name__
            seen[name] += 1
            if comm.rank() == 0 or not runs_on_first_rank_only(callback):
                self._callbacks[f"{name} {seen[name]}"] = callback
        self._at_begin: dict[str, dict[str, bytes]] = {}

    def begin(self, saved: dict[str, Any]) -> None:
        """Give back what was saved, when the callbacks have begun the training."""
        for key, callback in self._callbacks.items():
            own = {} if _speaks(callback) else _attributes(callback)
            self._at_begin[key] = {name: digest_of(own[name]) for name in own}
            if key in saved:
                _restore(callback, saved[key])

    def collected(self) -> dict[str, Any]:
        """The state of each callback by a key, as trees."""
        return {
            key: self._state_of(key, callback)
            for key, callback in self._callbacks.items()
        }

    def _state_of(self, key: str, callback: Any) -> Any:
        if _speaks(callback):
            return {"said": encoded(callback.state_dict())}
        at_begin = self._at_begin[key]
        own = _attributes(callback)
        changed = {n: t for n, t in own.items() if at_begin.get(n) != digest_of(t)}
        return {"changed": changed}


def _speaks(callback: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(callback, name, None)) for name in names)


def _attributes(callback: Any) -> dict[str, Any]:
    found = {}
    for name, value in vars(callback).items():
        if name not in _NOT_STATE and not callable(value):
            try:
                found[name] = encoded(value)
            except TypeError:
                continue
    return found


def _restore(callback: Any, state: Any) -> None:
    if "said" in state and _speaks(callback):
        callback.load_state_dict(decoded(state["said"]))
    for name, tree in state.get("changed", {}).items():
        setattr(callback, name, decoded(tree))


def with_history(callbacks: Sequence[Any]) -> list[Any]:
    """The same, with a `History` if there is none: Keras's own would come too late."""
    if any(isinstance(callback, keras.callbacks.History) for callback in callbacks):
        return list(callbacks)
    return [*callbacks, keras.callbacks.History()]
