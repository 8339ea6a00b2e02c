"""Callbacks of experiment trackers run on the first rank, known by their names."""

import contextlib
import sys
import types

import keras
import pytest

import keras_dist

pytestmark = [pytest.mark.three_ranks, pytest.mark.slow_on_three]

# Where the classes are defined that users import.
_TRACKERS = (
    ("mlflow.keras.callback", "MlflowCallback"),
    ("mlflow.tensorflow.callback", "MlflowModelCheckpointCallback"),
    ("wandb.integration.keras.callbacks.metrics_logger", "WandbMetricsLogger"),
    ("wandb.integration.keras.keras", "WandbCallback"),
    ("comet_ml.callbacks.keras", "CometKerasCallback"),
    ("neptune_tensorflow_keras.impl", "NeptuneCallback"),
    ("neptune.integrations.tensorflow_keras", "NeptuneCallback"),
    ("clearml.binding.frameworks.tensorflow_bind", "ClearMLCallback"),
)


def stand_in(module, name):
    """An object of a class that a user has made from one with this name."""

    def on_epoch_end(self, epoch, logs=None):
        self.logged.append(dict(logs))

    base = type(
        name,
        (keras.callbacks.Callback,),
        {"__module__": module, "on_epoch_end": on_epoch_end},
    )
    found = type("Own", (base,), {})()
    found.logged = []
    return found


def fit(model, rows, *callbacks):
    """Two epochs with an evaluation."""
    x, y = (array[:96] for array in rows)
    given = {"callbacks": list(callbacks), "validation_data": (x, y)}
    return keras_dist.dist_fit(model, x, y, batch_size=32, epochs=2, verbose=0, **given)


def test_trackers_run_on_the_first_rank_with_the_logs_of_all(rows, make_model):
    """Classes that inherit from theirs, too; the list is the same on all ranks."""
    callbacks = [stand_in(*names) for names in _TRACKERS]
    others = [stand_in("my.wandb", "Logger"), stand_in("wandbox", "Logger")]
    history = fit(make_model(), rows, *callbacks, *others).history
    logs = [{name: history[name][e] for name in history} for e in (0, 1)]
    assert all(callback.logged == logs for callback in others)
    is_first = keras_dist.rank() == 0
    assert all(c.logged == (logs if is_first else []) for c in callbacks)
    expected = 0.1 * keras_dist.size()
    assert history["effective_learning_rate"] == pytest.approx([expected] * 2)


def test_autologging_logs_on_the_first_rank(rows, make_model, monkeypatch):
    """As MLflow does it: in the place of `Model.fit`, unless it is turned off."""
    off, logged = [], []
    own_fit = keras.Model.fit

    @contextlib.contextmanager
    def disable_autologging():
        off.append(True)
        yield
        off.clear()

    def logging_fit(model, *args, callbacks, **kwargs):
        if not off:
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=log))
        return own_fit(model, *args, callbacks=callbacks, **kwargs)

    def log(epoch, logs):
        logged.append(logs["val_loss"])

    utils = types.ModuleType("mlflow.utils.autologging_utils")
    utils.disable_autologging = disable_autologging
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setattr(keras.Model, "fit", logging_fit)
    losses = fit(make_model(), rows).history["val_loss"]
    assert logged == (losses if keras_dist.rank() == 0 else []) and not off
