"""Optuna, where all ranks call the objective of each trial."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from keras_dist import comm
from keras_dist.callbacks import is_calling_callbacks
from keras_dist.tune.trials import begin, check_first, of_first, on_all, run

Choice = TypeVar("Choice")


def optimize(
    study: Any,
    objective: Callable[["Trial"], float | Sequence[float]],
    n_trials: int | None = None,
    timeout: float | None = None,
    **arguments: Any,
) -> None:
    """`study.optimize(…)` of Optuna, where all ranks call the objective of each trial.

    The study, with its storage, is on the first rank alone. On every rank the objective
    gets a `Trial` that suggests the first rank's values, and trains by `dist_fit` or
    `DistributedModel`. The result of the first rank counts.

    An error of a rank that `dist_fit` raises on all of them, or that is raised outside
    of it, ends the trial on all ranks. As on one process, one that is not in `catch`
    ends the study, on all ranks.

    Args:
        study: A study of Optuna on the first rank; ignored on the others.
        objective: Function of a `Trial` that returns the value to optimize, or several.
        n_trials, timeout, **arguments: As in `Study.optimize`, but for `n_jobs`: the
            ranks train one trial at a time.

    Returns:
        Nothing. The results are in the first rank's study.

    Raises:
        ValueError: On all ranks, if the first rank has no study, or if `n_jobs` is not
            1.
        Exception: On all ranks, the error that ended the study on the first one.

    Example:

    ```python
    def objective(trial):
        model = make_model(trial.suggest_float("rate", 1e-4, 1e-1, log=True))
        prunes = KerasPruningCallback(trial, "val_loss")  # of optuna_integration
        history = keras_dist.dist_fit(
            model, x, y, validation_data=(x, y), callbacks=[prunes]
        )
        return history.history["val_loss"][-1]

    study = optuna.create_study() if keras_dist.rank() == 0 else None
    keras_dist.tune.optimize(study, objective, n_trials=20)
    ```
    """

    def lead() -> None:
        def lead_trial(own: Any) -> Any:
            begin(own.number)
            return on_all(lambda: objective(Trial(own.number, own)))

        study.optimize(lead_trial, n_trials, timeout, **arguments)

    def join(number: int) -> None:
        objective(Trial(number, None))

    check_first(study, "study", "optimize")
    if arguments.get("n_jobs", 1) != 1:
        raise ValueError(
            "All ranks train one trial at a time. Received: "
            f"n_jobs={arguments['n_jobs']}. Leave it out, and start one job for each "
            "trial that is to run at the same time, with one storage for all."
        )
    run(lead, join)


class Trial:
    """A trial of Optuna on every rank: the first rank suggests, reports and prunes.

    All ranks call its methods in the same order. In callbacks, where the first rank may
    be alone, `should_prune` is `False` on the others: an error raised by the first one
    there, such as `optuna.TrialPruned`, ends the trial on all.

    What is not named here, the first rank reads from its trial of Optuna; the others
    do not have it.

    Args:
        number: Number of the trial.
        own: The trial of Optuna on the first rank, `None` on the others.

    Raises:
        AttributeError: On the other ranks, if something is read that is not named here.

    Example:

    ```python
    def objective(trial):
        units = trial.suggest_int("units", 8, 64)
        model = make_model(units, trial.suggest_float("rate", 1e-4, 1e-1, log=True))
        history = keras_dist.dist_fit(model, x, y)
        return history.history["loss"][-1]
    ```
    """

    def __init__(self, number: int, own: Any) -> None:
        self.number = number
        self.params: dict[str, Any] = {}
        self._own = own

    def suggest_float(self, name: str, *args: Any, **kwargs: Any) -> float:
        """Suggest a number, the same on all ranks.

        Args:
            name, *args, **kwargs: As in `optuna.trial.Trial.suggest_float`.

        Returns:
            The first rank's value.
        """
        return self._suggest("suggest_float", name, *args, **kwargs)

    def suggest_int(self, name: str, *args: Any, **kwargs: Any) -> int:
        """Suggest a whole number, the same on all ranks.

        Args:
            name, *args, **kwargs: As in `optuna.trial.Trial.suggest_int`.

        Returns:
            The first rank's value.
        """
        return self._suggest("suggest_int", name, *args, **kwargs)

    def suggest_categorical(self, name: str, choices: Sequence[Choice]) -> Choice:
        """Suggest one of several values, the same on all ranks.

        Args:
            name, choices: As in `optuna.trial.Trial.suggest_categorical`.

        Returns:
            The first rank's value.
        """
        return self._suggest("suggest_categorical", name, choices)

    def report(self, value: float, step: int) -> None:
        """Report the first rank's value; those of the other ranks are ignored.

        Args:
            value, step: As in `optuna.trial.Trial.report`.
        """
        if self._own is not None:
            self._own.report(value, step)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Set an attribute of the trial to the first rank's value.

        Args:
            key, value: As in `optuna.trial.Trial.set_user_attr`.
        """
        if self._own is not None:
            self._own.set_user_attr(key, value)

    def should_prune(self) -> bool:
        """Ask whether the trial is to end early.

        Returns:
            The first rank's answer; in callbacks, `False` on the other ranks.
        """
        own = self._own
        if is_calling_callbacks():
            return own is not None and own.should_prune()
        return of_first(lambda: own.should_prune())

    def _suggest(self, kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
        own = self._own
        value = of_first(lambda: getattr(own, kind)(name, *args, **kwargs))
        self.params[name] = value
        return value

    def __getattr__(self, name: str) -> Any:
        if self._own is None:
            raise AttributeError(
                "Only the first rank has all of a trial of Optuna. Received: "
                f"trial.{name} on rank {comm.rank()}. Read it where "
                "keras_dist.rank() is 0."
            )
        return getattr(self._own, name)
