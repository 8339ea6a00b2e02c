"""What `compile` of a Keras model does more, from the import of this module on."""

import functools
import warnings
from typing import Any

import keras

from keras_dist import comm
from keras_dist.horovod.averaging import average_outermost, averages

_OLD = "experimental_run_tf_function"


def install() -> None:
    """Change `compile` and `get_compile_config` of Keras's models, once.

    Scripts of Horovod pass an argument that Keras 3 does not know. Where mixed
    precision wraps an optimizer, the outer one has to average. XLA cannot compile a
    collective. And a model that was saved to `.h5` has lost the optimizer that a file
    in Keras's own format names.
    """
    for name, change in (
        ("compile", _compile),
        ("get_compile_config", _get_compile_config),
    ):
        owner = next(c for c in keras.Model.__mro__ if name in vars(c))
        own = vars(owner)[name]
        if not hasattr(own, "_keras_dist_own"):
            changed = _bound(change, own)
            changed._keras_dist_own = own
            setattr(owner, name, changed)


def _bound(change: Any, own: Any) -> Any:
    @functools.wraps(own)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, own, *args, **kwargs)

    return changed


def _compile(model: Any, own: Any, *args: Any, **kwargs: Any) -> None:
    if _OLD in kwargs:
        kwargs.pop(_OLD)
        warnings.warn(
            f"`{_OLD}` is left out: Keras 3 does not know this argument of `compile`. "
            "`keras-dist migrate` would remove it.",
            stacklevel=3,
        )
    own(model, *args, **kwargs)
    adapt(model)


def adapt(model: Any) -> None:
    """Let a compiled model's outermost optimizer average, outside of XLA."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not averages(optimizer) or comm.size() == 1:
        return
    average_outermost(optimizer)
    model.jit_compile = False


def _get_compile_config(model: Any, own: Any) -> Any:
    config = getattr(getattr(model, "_compile_config", None), "config", None)
    if config is not None and model.compiled and "optimizer" not in config:
        optimizer = model.optimizer
        if getattr(optimizer, "name", "") == "loss_scale_optimizer":
            optimizer = optimizer.inner_optimizer  # which `compile` wraps again
        config["optimizer"] = optimizer
    return own(model)
