"""Searches of KerasTuner, by two ranks or by plain Keras on one process.

python tests/trackers/search_keras_tuner.py FOLDER [plain]
"""

import json
import sys
from pathlib import Path

import keras
import keras_tuner
from small import BATCH, EPOCHS, data, make_model

import keras_dist

_FOLDER = Path(sys.argv[1])
_IS_PLAIN = sys.argv[2:] == ["plain"]


def is_last():
    """Whether this is the last rank."""
    return keras_dist.rank() == keras_dist.size() - 1


def build(hp):
    """A model; those with some rates fail on the last rank."""
    units = hp.Choice("units", [4, 8, 16, 32])
    rate = hp.Float("rate", 1e-3, 1e-1, sampling="log")
    if 0.0085 < rate < 0.009 and is_last():
        raise KeyError("rate")
    model = make_model(rate, units)
    model.units = units
    return model


class HasFit(keras_tuner.HyperModel):
    """Trains by itself, with a batch that is searched for, too."""

    def build(self, hp):
        return build(hp)

    def fit(self, hp, model, *args, batch_size, **kwargs):
        batch_size *= hp.Choice("factor", [1, 2])
        if _IS_PLAIN:
            return model.fit(*args, batch_size=batch_size, **kwargs)
        return keras_dist.dist_fit(model, *args, batch_size=batch_size, **kwargs)


class FailsAtTwo(keras.callbacks.Callback):
    """Raises on the last rank at the end of the second epoch of one choice."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and self.model.units == 16 and is_last():
            raise ValueError("sixteen")


def search(name, make, hypermodel, *, is_global=False):
    """Search, and write what the trials were; `is_global` is by `batch="global"`."""
    (x, y), validation_data = data()
    given = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    given |= {"validation_data": validation_data, "callbacks": [FailsAtTwo()]}
    tuner = None
    with keras_dist.first_rank() as is_first:
        if is_first:
            tuner = make(
                hypermodel,
                objective="val_loss",
                seed=3,
                directory=_FOLDER,
                project_name=name,
                max_consecutive_failed_trials=10,
            )
    if _IS_PLAIN:
        tuner.search(x, y, batch_size=2 * BATCH, **given)
    elif is_global:
        given["batch"] = "global"
        keras_dist.tune.search(tuner, hypermodel, x, y, batch_size=2 * BATCH, **given)
    else:
        given["lr_scaling"] = "none"
        keras_dist.tune.search(tuner, hypermodel, x, y, batch_size=BATCH, **given)
    if is_first:
        trials = [tuner.oracle.trials[key] for key in sorted(tuner.oracle.trials)]
        found = [(t.hyperparameters.values, t.status, t.score) for t in trials]
        found += [len(tuner.get_best_models())]
        (_FOLDER / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":

    def make_random(*args, **kwargs):
        return keras_tuner.RandomSearch(*args, max_trials=6, **kwargs)

    def make_hyperband(*args, **kwargs):
        return keras_tuner.Hyperband(*args, max_epochs=3, factor=3, **kwargs)

    search("random", make_random, build)
    search("global", make_random, build, is_global=True)
    search("own_fit", make_random, HasFit())
    search("hyperband", make_hyperband, build)
