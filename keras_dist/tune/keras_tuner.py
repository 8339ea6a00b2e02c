"""KerasTuner, where all ranks train the model of each trial."""

import copy
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import comm
from keras_dist.fit import dist_fit
from keras_dist.tune.trials import begin, check_first, on_all, run


def search(tuner: Any, hypermodel: Any, *fit_args: Any, **fit_kwargs: Any) -> None:
    """`tuner.search(…)` of KerasTuner, where all ranks train the model of each trial.

    The tuner is on the first rank alone, which chooses the hyperparameters and writes
    the tuner's folder. `dist_fit` trains in the place of `model.fit`: all of its
    arguments can be given here. A hypermodel that has a `fit` of its own calls
    `dist_fit` there by itself.

    An error of a rank that `dist_fit` raises on all of them, or that is raised in
    `hypermodel.build` or outside of `dist_fit`, ends the trial on all ranks, and
    KerasTuner counts it as failed.

    Args:
        tuner: A tuner of KerasTuner on the first rank; ignored on the others.
        hypermodel: The function or `HyperModel` that the tuner was made with, on all
            ranks.
        *fit_args, **fit_kwargs: The arguments of `tuner.search`, on all ranks.

    Returns:
        Nothing. The results are in the first rank's tuner.

    Raises:
        ValueError: On all ranks, if the first rank has no tuner, or if the tuner
            compiles the models.
        Exception: On all ranks, the error that ended the search on the first one.

    Example:

    ```python
    tuner = None
    with keras_dist.first_rank() as is_first:
        if is_first:
            tuner = keras_tuner.RandomSearch(build, "val_loss", max_trials=10)
    keras_dist.tune.search(tuner, build, x, y, epochs=5, validation_data=(x, y))
    ```
    """

    def fit(hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(hypermodel, "fit", None)
        if own is not None and not _is_of_library(own, "keras_tuner"):
            return own(hp, model, *args, **kwargs)
        return dist_fit(model, *args, **kwargs)

    def join(trial: tuple[Any, dict[str, Any]]) -> None:
        hp, changed = trial
        keras.utils.clear_session()
        model = getattr(hypermodel, "build", hypermodel)(hp)
        own = {"callbacks": copy.deepcopy(fit_kwargs.get("callbacks", []))}
        fit(hp, model, *fit_args, **{**fit_kwargs, **changed, **own})

    def lead() -> None:
        own = tuner.hypermodel
        tuner.hypermodel = _OnAllRanks(own, fit)
        try:
            tuner.search(*fit_args, **fit_kwargs)
        finally:
            tuner.hypermodel = own

    check_first(tuner, "tuner", "search")
    comm.run_on_all(lambda: _check_compiles_nothing(tuner))
    run(lead, join)


class _OnAllRanks:
    """The tuner's hypermodel, whose `fit` calls the other ranks."""

    def __init__(self, own: Any, fit: Callable[..., Any]) -> None:
        self._own = own
        self._fit = fit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def fit(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Hyperband trains each trial for epochs of its own.
        names = {"epochs", "initial_epoch"} & set(kwargs)
        begin((hp, {name: kwargs[name] for name in names}))
        return on_all(lambda: self._fit(hp, model, *args, **kwargs))


def _check_compiles_nothing(tuner: Any) -> None:
    names = ("optimizer", "loss", "metrics") if comm.rank() == 0 else ()
    if compiled := [name for name in names if getattr(tuner, name, None)]:
        raise ValueError(
            "The other ranks cannot see how the tuner compiles a model. Received: a "
            f"tuner with {', '.join(compiled)}. Compile in the hypermodel."
        )


def _is_of_library(function: Any, library: str) -> bool:
    return getattr(function, "__module__", "").partition(".")[0] == library
