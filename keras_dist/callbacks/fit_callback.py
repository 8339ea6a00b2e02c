"""`FitCallback`: with one of these in its list, `model.fit` trains on all ranks."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import keras

from keras_dist import mixin
from keras_dist.training.install import open_fit
from keras_dist.training.session import session_of
from keras_dist.training.step import DistributedStep

# An attribute of a `keras.Model.fit` that opens a fit.
OPENS_FIT = "_keras_dist_opens_fit"

_is_in_fit: ContextVar[bool] = ContextVar("is_in_fit", default=False)


class FitCallback(keras.callbacks.Callback):
    """Makes its model train on all ranks until the fit is over.

    In a loop of the user's own, with a `CallbackList`, the last one ends the fit.
    """

    def __init__(self) -> None:
        super().__init__()
        if not is_in_fit():  # it is the user's
            _replace_fit()

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if not mixin.has(model, DistributedStep):
            stack = contextlib.ExitStack()
            session = stack.enter_context(open_fit(model))
            session.is_running, session.end_loop = True, stack.close
        session_of(model).last_callback = self

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        session = session_of(self.model)
        if session.last_callback is self:
            session.end_loop()


def flatten_callbacks(given: Any) -> list[Any]:
    """List what the user passed to Keras as `callbacks`."""
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    return keras.tree.flatten(given or [])


@contextlib.contextmanager
def enter_fit() -> Iterator[None]:
    """Context manager in which a `dist_fit` runs."""
    token = _is_in_fit.set(True)
    try:
        yield
    finally:
        _is_in_fit.reset(token)


def is_in_fit() -> bool:
    """Return True in a `dist_fit`, such as in a callback."""
    return _is_in_fit.get()


def _replace_fit() -> None:
    """From now on, `model.fit` with a `FitCallback` in its list opens a fit.

    Keras calls no callback when it raises, so none of them could end the fit.
    """
    plain = keras.Model.fit
    if getattr(plain, OPENS_FIT, False):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        given: Any = None
        with contextlib.suppress(TypeError):  # Keras raises it
            given = signature.bind(model, *args, **kwargs).arguments.get("callbacks")
        is_ours = any(isinstance(c, FitCallback) for c in flatten_callbacks(given))
        session = vars(model).get("_distributed_session")
        with contextlib.ExitStack() as stack:
            if is_ours and (session is None or session.is_running):
                session = stack.enter_context(open_fit(model))
            if session is not None:
                stack.enter_context(session.run())
            return plain(model, *args, **kwargs)

    setattr(fit, OPENS_FIT, True)
    mixin.set_method(keras.Model, "fit", fit)
