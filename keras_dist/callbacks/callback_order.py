"""The order of the callbacks, which of them this rank runs, and which a fit adds."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_dist import comm
from keras_dist.callbacks.average_statistics import AverageStatistics
from keras_dist.callbacks.broadcast_variables import BroadcastVariables
from keras_dist.callbacks.fit_callback import flatten_callbacks
from keras_dist.callbacks.metric_average import MetricAverage
from keras_dist.callbacks.replica_check import ReplicaCheck
from keras_dist.callbacks.stop_at_accuracy import StopAtAccuracy
from keras_dist.callbacks.stop_together import StopTogether
from keras_dist.callbacks.throughput import Throughput
from keras_dist.callbacks.user_callbacks import UserCallbacks, is_tracker, runs_here
from keras_dist.launch.monitor.record import Record, here
from keras_dist.optimizer.rate import effective_rates
from keras_dist.training.session import session_of


class FitHooks(keras.callbacks.Callback):
    """What a fit does around Keras's loop, before all other callbacks.

    - Reports of ranks that wait name epoch and step: they are written to this rank's
      record. There is no hook at the end of a batch: with one, Keras would wait for
      each batch.
    - The data and the train step learn which epoch begins, before its data is read.
    - The rate of the epoch's last update is `logs["effective_learning_rate"]`, if some
      rank has a `TensorBoard` or a tracker. The `learning_rate` that these write is the
      rate for one process, because the scaling factor is applied only inside the
      update. With several optimizers in a `MultiOptimizer`, the name of each one is
      appended to the key, as in Keras.

    Args:
        is_read: Whether the list has a `TensorBoard` or a tracker.
    """

    def __init__(self, is_read: bool = False) -> None:
        super().__init__()
        self._is_read = is_read
        # One rank waits for nobody, and Keras may call its callbacks in a thread.
        self._record = here if comm.size() > 1 else Record()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._record.enter("begin", epoch=0)
        self._is_read = any(comm.gather(self._is_read))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._record.enter("begin", epoch=epoch)
        session_of(self.model).begin_epoch(epoch)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self._record.enter("step", step=batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._record.enter("test")

    def on_test_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self._record.enter("test", step=batch)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._record.enter("end")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._record.enter("end")
        if logs is not None and self._is_read:
            logs.update(effective_rates(self.model))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._record.enter("")


# Callbacks of ours that change logs or state come before the user's, which read them;
# those that react to what other callbacks did come after.
_FIRST = (
    FitHooks,
    AverageStatistics,
    MetricAverage,
    Throughput,
    ReplicaCheck,  # after `Throughput`, which must not count its time
)
_LAST = (StopAtAccuracy, StopTogether, BroadcastVariables)

# Keras searches the list for these, so `UserCallbacks` must not contain them.
_KERAS_OWN = (keras.callbacks.History, keras.callbacks.ProgbarLogger)

# Added if the user's list has none of the class.
_ON_ONE_RANK: tuple[Callable[[], Any], ...] = (Throughput,)
_ON_MANY_RANKS: tuple[Callable[[], Any], ...] = (
    Throughput,
    AverageStatistics,
    functools.partial(ReplicaCheck, every=None),
    MetricAverage,
    StopTogether,
    BroadcastVariables,
)


def order_callbacks(given: Any, target_accuracy: float | None = None) -> list[Any]:
    """Add the callbacks that a fit needs to the user's, and put all of them in order.

    Args:
        given: What the user passed to `fit` as `callbacks`.
        target_accuracy: If not `None`, a `StopAtAccuracy` with this target is added.

    Returns:
        The callbacks of all ranks; of those that are added, one of each class.
    """
    every = flatten_callbacks(given)
    for make in _ON_ONE_RANK if comm.size() == 1 else _ON_MANY_RANKS:
        made = make()
        if not any(isinstance(callback, type(made)) for callback in every):
            every.append(made)
    if target_accuracy is not None:
        every.append(StopAtAccuracy(target_accuracy))
    is_read = any(
        isinstance(c, keras.callbacks.TensorBoard) or is_tracker(c) for c in every
    )
    every.append(FitHooks(is_read))
    return [
        *(c for cls in _FIRST for c in every if isinstance(c, cls)),
        *(c for c in every if not isinstance(c, _FIRST + _LAST)),
        *(c for cls in _LAST for c in every if isinstance(c, cls)),
    ]


def on_this_rank(callbacks: Sequence[Any]) -> list[Any]:
    """Select the callbacks that run on this rank; the user's in one `UserCallbacks`.

    Args:
        callbacks: The same list on all ranks, as `order_callbacks` returns it.

    Returns:
        The callbacks to pass to Keras; on one rank, all of them unchanged.
    """
    if comm.size() == 1:
        return list(callbacks)
    running = list(filter(runs_here, callbacks))
    not_the_users = _FIRST + _LAST + _KERAS_OWN
    return [
        *(c for c in running if isinstance(c, _FIRST)),
        UserCallbacks([c for c in callbacks if not isinstance(c, not_the_users)]),
        *(c for c in running if isinstance(c, _KERAS_OWN)),
        *(c for c in running if isinstance(c, _LAST)),
    ]
