"""`FitCallback` makes `model.fit` a fit on all ranks; `dist_fit` has `FitHooks`."""

import contextlib
import functools
from typing import Any

import keras

from keras_dist import comm, mixin
from keras_dist.data import draws
from keras_dist.launch.monitor.record import Record, here
from keras_dist.optimizer.rate import effective_rates
from keras_dist.training.install import open_fit
from keras_dist.training.session import session_of
from keras_dist.training.step import DistributedStep

# An attribute of a `keras.Model.fit` that opens a fit.
OPENS_FIT = "_keras_dist_opens_fit"


class FitCallback(keras.callbacks.Callback):
    """Makes its model train on all ranks until the fit is over.

    In a loop of the user's own, with a `CallbackList`, the last one ends the fit.
    """

    def __init__(self) -> None:
        super().__init__()
        if not draws.is_in_fit.get():  # it is the user's
            _replace_fit()

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if not mixin.has(model, DistributedStep):
            stack = contextlib.ExitStack()
            session = stack.enter_context(open_fit(model))
            session.end_loop = stack.close
        session_of(model).last_callback = self

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        session = session_of(self.model)
        if session.last_callback is self:
            session.end_loop()


class FitHooks(keras.callbacks.Callback):
    """Do what a fit needs around Keras's loop, before the other callbacks run.

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


def flatten_callbacks(callbacks: Any) -> list[Any]:
    """List what the user passed to Keras as `callbacks`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return keras.tree.flatten(callbacks or [])


def _replace_fit() -> None:
    """From now on, `model.fit` with a `FitCallback` in its list opens a fit.

    Keras calls no callback when it raises, so none of them could end the fit.
    """
    plain = keras.Model.fit
    if getattr(plain, OPENS_FIT, False):
        return

    @functools.wraps(plain)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("callbacks", args[5] if args[5:] else None)
        given = flatten_callbacks(given)
        is_ours = any(isinstance(callback, FitCallback) for callback in given)
        is_open = any(isinstance(callback, FitHooks) for callback in given)
        with open_fit(model) if is_ours and not is_open else contextlib.nullcontext():
            return plain(model, *args, **kwargs)

    setattr(fit, OPENS_FIT, True)
    mixin.set_method(keras.Model, "fit", fit)
