"""`distribute`: `fit`, `evaluate` and `predict` of every Keras model use all ranks."""

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import keras

from keras_dist import comm, fit, mixin, private
from keras_dist.callbacks.fit_hooks import OPENS_FIT
from keras_dist.data import draws
from keras_dist.data.division import StepsRule
from keras_dist.data.source import is_alone
from keras_dist.lines import find_caller
from keras_dist.optimizer import step_context
from keras_dist.optimizer.attach import ReducesGradients
from keras_dist.optimizer.rate import LearningRateRule
from keras_dist.setup.arguments import Options

# `global` or `rank`: `import keras_dist` calls `distribute` with this `batch`.
VARIABLE = "KERAS_DIST"

# A folder: the script's first fit resumes from its folder `fit_1`, and so on.
RESUME = "KERAS_DIST_RESUME"

_fits = itertools.count(1)
_options: list[Options] = []
_changes = contextlib.ExitStack()


def distribute(
    batch: Literal["global", "rank"] = "global",
    *,
    lr_scaling: LearningRateRule | Literal["auto"] = "auto",
    warmup_epochs: float = 0,
    steps_scaling: StepsRule = "auto",
    validation_steps_scaling: StepsRule = "auto",
    batch_norm: Literal["auto", "global", "rank"] = "auto",
    shard: Literal["auto", "none", "first"] = "auto",
    save_steps: int | None = None,
    save_seconds: float | None = 300,
) -> contextlib.AbstractContextManager[Any]:
    """Let `fit`, `evaluate` and `predict` of every Keras model use all ranks.

    This applies from the call on, or inside `with distribute():`, and includes calls by
    packages. On one process, nothing changes. `keras-dist run --distribute script.py`
    calls this before the first line of the script; `import keras_dist` calls it if the
    environment variable `KERAS_DIST` is `global` or `rank`.

    With the variable `KERAS_DIST_RESUME=folder`, the k-th fit of the script resumes
    from the subfolder `fit_k`. Fits in callbacks do not count, and do not resume.

    Args:
        batch, lr_scaling, warmup_epochs, steps_scaling, validation_steps_scaling,
            batch_norm, shard, save_steps, save_seconds: See `dist_fit`. Here the
            default of `batch` is `"global"`, so a script for one process gives the same
            model.

    Returns:
        A context manager that undoes the change when it exits. Using it is optional.

    Raises:
        ValueError: If `batch` is unknown.
        RuntimeError: Later, on several ranks: if `train_on_batch`, `test_on_batch`, or
            `optimizer.apply` in your own loop is called without a
            `DistributedOptimizer`; or if the ranks call different methods.

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> with distribute():
    ...     history = model.fit(np.ones((8, 2)), np.ones(8), verbose=0)
    """
    options = Options(**locals())
    options.resolve()
    stack = contextlib.ExitStack()
    is_used = comm.job_world().size > 1 or os.environ.get(RESUME)
    if is_used and not comm.is_rank_child():
        _begin(options)
        stack.callback(_end, options)  # not a generator, which ends when it is dropped
    return stack


def _begin(options: Options) -> None:
    _options.append(options)
    if len(_options) == 1:
        for (cls, name), make in _METHODS.items():
            plain = getattr(cls, name)
            # Its signature stays: packages choose by it what they pass on.
            method = functools.wraps(plain)(make(plain, name))
            setattr(method, OPENS_FIT, True)
            _changes.callback(mixin.set_method(cls, name, method))


def _end(options: Options) -> None:
    _options.remove(options)
    if not _options:
        _changes.close()


def _train(
    model: Any, arguments: dict[str, Any], options: Options, plain: Callable[..., Any]
) -> Any:
    folder = os.environ.get(RESUME)
    # A process that resumes makes fewer fits in callbacks, so they have no number.
    if folder and not draws.is_in_fit.get():
        options = replace(options, resume=Path(folder, f"fit_{next(_fits)}"))
    return fit.fit(model, arguments, options, plain)


def _on_all(
    plain: Callable[..., Any], name: str, run: Callable[..., Any]
) -> Callable[..., Any]:
    """Make the method that calls `run` on all ranks, with the arguments by name."""

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_serial = name != "fit" and comm.size() == 1
        if private.CALLED_BY_FIT in kwargs or is_serial or fit.is_plain(model, name):
            return plain(model, *args, **kwargs)
        arguments = _bind(plain, model, args, kwargs)
        _meet(model, name)
        return run(model, arguments, _options[-1], plain.__get__(model))

    return call


def _bind(
    method: Callable[..., Any], model: Any, args: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Name the arguments as Keras does, which raises the usual errors."""
    bound = inspect.signature(method).bind(model, *args, **kwargs)
    bound.apply_defaults()
    _, *named = bound.arguments.items()
    arguments = dict(named)
    if more := arguments.pop("kwargs", {}):
        raise TypeError(f"Received unknown arguments: {more}")
    return arguments


def _on_batch(plain: Callable[..., Any], _: str) -> Callable[..., Any]:
    return lambda model, *args, **kwargs: fit.call_on_batch(
        model, plain.__get__(model), *args, **kwargs
    )


def _on_apply(plain: Callable[..., Any], _: str) -> Callable[..., Any]:
    def call(optimizer_: Any, *args: Any, **kwargs: Any) -> Any:
        averages = mixin.has(optimizer_, ReducesGradients)
        is_ours = averages or step_context.is_inside()
        if is_ours or is_alone() or comm.size() == 1 or comm.is_rank_child():
            return plain(optimizer_, *args, **kwargs)
        raise RuntimeError(
            "An optimizer that does not average its gradients updates weights in a "
            f"loop of your own on {comm.size()} ranks: their models would drift apart. "
            f"Received: {optimizer_!r}, at {find_caller()}. Pass it to "
            "keras_dist.DistributedOptimizer, and give each rank its own rows."
        )

    return call


_METHODS: dict[tuple[Any, str], Callable[..., Any]] = {
    (keras.Model, "fit"): functools.partial(_on_all, run=_train),
    (keras.Model, "evaluate"): functools.partial(_on_all, run=fit.evaluate),
    (keras.Model, "predict"): functools.partial(_on_all, run=fit.predict),
    (keras.Model, "train_on_batch"): _on_batch,
    (keras.Model, "test_on_batch"): _on_batch,
    (keras.optimizers.Optimizer, "apply"): _on_apply,
}


def _meet(model: Any, name: str) -> None:
    """Compare what all ranks call; an error names the lines of those that differ."""
    call = f"`{name}` of a {model.__class__.__name__} at {find_caller()}"
    comm.agree(
        {"which method of Keras is called": call},
        advice="Inside of `distribute` all ranks call the same ones: also those that "
        "do nothing with the result.",
    )
