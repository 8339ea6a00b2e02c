"""Trainings that MLflow logs: by two ranks, or by plain Keras on one process.

    python tests/trackers/logs_mlflow.py FOLDER [plain]

Each is a run, or several, of an experiment with the name of the function.
"""

import contextlib
import sys

import mlflow
from small import train

import keras_dist


def by_callback():
    """The callback in the list, in a run that the first rank begins."""
    with first_rank_run():
        train([mlflow.keras.MlflowCallback()])


def by_keras_autolog():
    """A run that MLflow begins."""
    mlflow.keras.autolog()
    train()
    mlflow.keras.autolog(disable=True)


def by_tensorflow_autolog():
    """A run that MLflow begins, with the log of a TensorBoard in it."""
    mlflow.tensorflow.autolog(log_models=False)
    train()
    mlflow.tensorflow.autolog(disable=True)


def by_autolog():
    """Whatever MLflow can log but models, in a run that the first rank begins."""
    mlflow.autolog(log_models=False)
    with first_rank_run():
        train()
    mlflow.autolog(disable=True)


def first_rank_run():
    """A run that the first rank begins."""
    is_first = keras_dist.rank() == 0
    return mlflow.start_run() if is_first else contextlib.nullcontext()


if __name__ == "__main__":
    mlflow.set_tracking_uri(f"file:{sys.argv[1]}")
    # `mlflow.autolog` leaves out what was configured before.
    for log in (by_autolog, by_callback, by_keras_autolog, by_tensorflow_autolog):
        with keras_dist.first_rank():
            mlflow.set_experiment(log.__name__)
        log()
