"""Studies of Optuna, by two ranks or by plain Keras on one process.

python tests/trackers/search_optuna.py FOLDER [plain]
"""

import json
import sys
from pathlib import Path

import keras
import optuna
from optuna_integration import KerasPruningCallback
from small import EPOCHS, fit, make_model

import keras_dist

_FOLDER = Path(sys.argv[1])
_IS_PLAIN = sys.argv[2:] == ["plain"]
_TRIALS = 12


def is_last():
    """Whether this is the last rank."""
    return keras_dist.rank() == keras_dist.size() - 1


def suggested(trial):
    """A model by three kinds of suggestions; one choice fails on the last rank."""
    rate = trial.suggest_float("rate", 1e-3, 1e-1, log=True)
    units = trial.suggest_int("units", 4, 16, step=4)
    kind = trial.suggest_categorical("kind", ["raises", "trains", "fails"])
    if kind == "raises" and is_last():
        raise KeyError("tea")
    model = make_model(rate, units)
    model.fails = kind == "fails"
    return model


class Fails(keras.callbacks.Callback):
    """Raises on the last rank at the end of the second epoch of one choice."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and self.model.fails and is_last():
            raise ValueError("fails")


def by_callback(trial):
    """Pruned in a fit, by the callback of Optuna's own integration."""
    callbacks = [Fails(), KerasPruningCallback(trial, "val_loss")]
    model = suggested(trial)
    history = fit(model, is_plain=_IS_PLAIN, callbacks=callbacks)
    return history.history["val_loss"][-1]


def by_epochs(trial):
    """Pruned between two fits."""
    model = suggested(trial)
    for epoch in range(EPOCHS):
        history = fit(model, is_plain=_IS_PLAIN, epochs=1)
        loss = history.history["val_loss"][-1]
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr("epochs", EPOCHS)
    return loss


def by_own_callback(trial):
    """Pruned in a fit, by a callback that runs on all ranks."""

    def report(epoch, logs):
        trial.report(logs["val_loss"], epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    model = suggested(trial)
    prunes = keras.callbacks.LambdaCallback(on_epoch_end=report)
    history = fit(model, is_plain=_IS_PLAIN, callbacks=[prunes])
    return history.history["val_loss"][-1]


def optimize(objective):
    """Optimize, and write what the trials were."""
    study = None
    if is_first := keras_dist.rank() == 0:
        study = optuna.create_study(
            storage=f"sqlite:///{_FOLDER}/study.db",
            study_name=objective.__name__,
            sampler=optuna.samplers.TPESampler(seed=2),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=1),
        )
    if _IS_PLAIN:
        study.optimize(objective, n_trials=_TRIALS, catch=(Exception,))
    else:
        given = {"n_trials": _TRIALS, "catch": (Exception,)}
        keras_dist.tune.optimize(study, objective, **given)
    if is_first:
        found = [
            (t.state.name, t.params, t.user_attrs, t.value, t.intermediate_values)
            for t in study.trials
        ]
        (_FOLDER / f"{objective.__name__}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for objective in (by_callback, by_epochs, by_own_callback):
        optimize(objective)
