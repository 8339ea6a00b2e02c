"""The callbacks that `report=` and `keras-dist scale` add to those of the user."""

import itertools
import os
from dataclasses import replace

import keras

from keras_dist import callbacks as ours
from keras_dist.report.training import path_of_fit, study_of
from keras_dist.setup.arguments import KerasArguments
from keras_dist.setup.fit_setup import FitSetup
from keras_dist.setup.options import Options

_numbers = itertools.count(1)  # of the fits of this process, for a study


def with_reports(given: KerasArguments, options: Options) -> KerasArguments:
    """Add the report that was asked for; and in a run of a study, what it asks for.

    This is the one function that knows of a study: with the variable that `keras-dist
    scale` sets, an unchanged script writes its numbers, trains the given epochs, and
    stops at the target.

    Args:
        given: The arguments of `dist_fit` that are those of `Model.fit`.
        options: All other arguments of `dist_fit`.
    """
    added: list[keras.callbacks.Callback] = []
    if options.report is not None:
        added.append(ours.Report(options.report))
    study = study_of(os.environ)
    if study is not None and options.process_set is None:
        added.append(ours.Report(path_of_fit(study.path, next(_numbers))))
        if study.target is not None:
            added.append(
                ours.StopAtTarget(
                    study.target, study.metric, has_validation=given.has_validation
                )
            )
        if study.epochs is not None:
            given = replace(given, epochs=given.initial_epoch + study.epochs)
    if not added:
        return given
    callbacks = given.callbacks or []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    every = [*keras.tree.flatten(callbacks), *added]
    return replace(given, callbacks=every)


def with_plan(setup: FitSetup) -> FitSetup:
    """The same setup, whose reports show its plan and read its other callbacks."""
    for callback in setup.callbacks:
        if isinstance(callback, ours.Report):
            callback.use(setup.plan, setup.callbacks)
    return setup
