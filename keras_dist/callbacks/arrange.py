"""The order in which callbacks have to stand, whichever the user gave."""

from typing import Any

import keras

from keras_dist import comm
from keras_dist.callbacks.average_statistics import AverageStatistics
from keras_dist.callbacks.broadcast_variables import BroadcastVariables
from keras_dist.callbacks.metric_average import MetricAverage
from keras_dist.callbacks.stop_at_accuracy import StopAtAccuracy
from keras_dist.callbacks.stop_together import StopTogether
from keras_dist.callbacks.throughput import Throughput
from keras_dist.callbacks.training_time import TrainingTime

# Ours that change logs or state come before the user's callbacks, which read them;
# ours that act on what the others did come after.
_FIRST = (AverageStatistics, MetricAverage, Throughput, TrainingTime)
_LAST = (StopAtAccuracy, StopTogether, BroadcastVariables)

_ON_ONE_RANK: tuple[type, ...] = (Throughput,)
_ON_MANY_RANKS: tuple[type, ...] = (
    Throughput,
    AverageStatistics,
    MetricAverage,
    StopTogether,
    BroadcastVariables,
)


def arrange(given: Any, target_accuracy: float | None = None) -> list[Any]:
    """The user's callbacks with ours around them, none of ours twice.

    Args:
        given: What the user passed to `fit` as `callbacks`.
        target_accuracy: Of the `StopAtAccuracy` to add, if any.
    """
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    every = keras.tree.flatten(given) if given else []
    for cls in _ON_ONE_RANK if comm.size() == 1 else _ON_MANY_RANKS:
        if not any(isinstance(callback, cls) for callback in every):
            every.append(cls())
    if target_accuracy is not None:
        every.append(StopAtAccuracy(target_accuracy))
    return [
        *(c for cls in _FIRST for c in every if isinstance(c, cls)),
        *(c for c in every if not isinstance(c, _FIRST + _LAST)),
        *(c for cls in _LAST for c in every if isinstance(c, cls)),
    ]
