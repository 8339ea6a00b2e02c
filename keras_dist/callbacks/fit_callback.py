"""`FitCallback`: with one of these in its list, `model.fit` trains on all ranks."""

import contextlib
import functools
import inspect
from typing import Any

import keras

from keras_dist import mixin
from keras_dist.training.install import open_fit
from keras_dist.training.session import session_of
from keras_dist.training.step import DistributedStep


class FitCallback(keras.callbacks.Callback):
    """Makes its model train on all ranks until the fit is over.

    In a loop of the user's own, with a `CallbackList`, the last one ends the fit.
    """

    def __init__(self) -> None:
        super().__init__()
        replace_fit()

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


@functools.cache
def replace_fit() -> None:
    """From now on, `model.fit` with a `FitCallback` in its list opens a fit.

    Keras calls no callback when it raises, so none of them could end the fit.
    """
    plain = keras.Model.fit
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

    mixin.set_method(keras.Model, "fit", fit)
