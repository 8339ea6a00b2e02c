"""The order of the callbacks, which of them this rank runs, and which a fit adds."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist import comm
from keras_dist.callbacks.average_statistics import AverageStatistics
from keras_dist.callbacks.broadcast_variables import BroadcastVariables
from keras_dist.callbacks.fit_hooks import FitCallback, FitEdge, flatten_callbacks
from keras_dist.callbacks.metric_average import MetricAverage
from keras_dist.callbacks.replica_check import ReplicaCheck
from keras_dist.callbacks.stop_at_accuracy import StopAtAccuracy
from keras_dist.callbacks.stop_together import StopTogether
from keras_dist.callbacks.throughput import Throughput
from keras_dist.callbacks.user_callbacks import UserCallbacks, is_tracker, runs_here

# Keras searches the list for these, so `UserCallbacks` must not contain them.
_KERAS_OWN = (keras.callbacks.History, keras.callbacks.ProgbarLogger)

# Added if the user's list has none of the class; on one rank, the first of them alone.
_ADDED = (
    Throughput,
    AverageStatistics,
    ReplicaCheck,
    MetricAverage,
    StopTogether,
    BroadcastVariables,
)


def order_callbacks(callbacks: Any, target_accuracy: float | None = None) -> list[Any]:
    """Add the callbacks that a fit needs to the user's, and put its edges around them.

    Args:
        callbacks: What the user passed to `fit` as `callbacks`.
        target_accuracy: If not `None`, a `StopAtAccuracy` with this target is added.

    Returns:
        The callbacks of all ranks; of those that are added, one of each class.
    """
    every = flatten_callbacks(callbacks)
    for cls in _ADDED[: 1 if comm.size() == 1 else None]:
        if not any(isinstance(callback, cls) for callback in every):
            every.append(ReplicaCheck(None) if cls is ReplicaCheck else cls())
    if target_accuracy is not None:
        every.append(StopAtAccuracy(target_accuracy))
    is_read = any(
        isinstance(c, keras.callbacks.TensorBoard) or is_tracker(c) for c in every
    )
    return [FitEdge(is_read), *every, FitEdge()]


def on_this_rank(callbacks: Sequence[Any]) -> list[Any]:
    """Select the callbacks that run on this rank; the user's in one `UserCallbacks`.

    Args:
        callbacks: The same list on all ranks, as `order_callbacks` returns it.

    Returns:
        The callbacks to pass to Keras; on one rank, all of them unchanged.
    """
    if comm.size() == 1:
        return list(callbacks)
    ours = [c for c in callbacks if isinstance(c, FitCallback)]
    not_the_users = (FitCallback, *_KERAS_OWN)
    return [
        *ours[:-1],
        UserCallbacks([c for c in callbacks if not isinstance(c, not_the_users)]),
        *(c for c in callbacks if isinstance(c, _KERAS_OWN) and runs_here(c)),
        *ours[-1:],
    ]
