"""Save checkpoints during a fit, and resume a training that was ended.

This file has `saving`, the block around a fit. The others, from the file on the disk up
to the callback that saves:

- `files`: a folder of checkpoint files, to which one training at a time writes, each
  with a checksum and replaced atomically; Python values as trees of JSON and arrays
- `states`: the state of the model on all ranks, of callbacks and of random generators
- `saved`: the content of a checkpoint; the newest one as the start of a fit, also on
  another number of ranks
- `saver`: the callback that saves when a clock or SIGTERM asks for it, in a thread, and
  that restores before the first step
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist import comm
from keras_dist.checkpoint.saved import Resume, opened
from keras_dist.checkpoint.saver import EXIT_CODE, Saver
from keras_dist.checkpoint.states import with_history
from keras_dist.lines import say
from keras_dist.setup.fit_setup import FitSetup

__all__ = ["EXIT_CODE", "Resume", "opened", "saving"]


@contextlib.contextmanager
def saving(resume: Resume | None, setup: FitSetup) -> Iterator[dict[str, Any]]:
    """Context manager for a fit that starts where its checkpoint ends, and saves.

    Args:
        resume: The folder of the checkpoints, and the one to resume from; `None` to
            save nothing.
        setup: The arguments and data of this rank.

    Yields:
        The arguments to pass to `Model.fit`.
    """
    if resume is None:
        yield setup.arguments
        return
    arguments, saved = dict(setup.arguments), resume.saved
    if saved is not None:
        arguments["initial_epoch"] = _first_epoch(resume, setup)
        _print_position(resume, setup)
        for callback in setup.callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
    callbacks = with_history(arguments["callbacks"])
    histories = [c for c in callbacks if isinstance(c, keras.callbacks.History)]
    others = [c for c in setup.callbacks if not isinstance(c, keras.callbacks.History)]
    saver = Saver(resume, setup, others + histories)
    try:
        yield arguments | {"callbacks": [*callbacks, saver]}
    finally:
        saver.close()


def _first_epoch(resume: Resume, setup: FitSetup) -> int:
    """Epoch in which to resume; `epochs` if the training had finished."""
    saved = resume.saved
    assert saved is not None
    if saved.is_finished:
        return int(setup.arguments["epochs"])
    division = setup.training.division
    if saved.position.step and division is None:
        raise ValueError(
            "The training cannot be resumed in the middle of an epoch with this data. "
            f"Received: {setup.training.plan.kind}, and a checkpoint of the middle of "
            "an epoch. Pass the same data as before, or an empty folder."
        )
    return saved.position.epoch if division is None else division.epoch


def _print_position(resume: Resume, setup: FitSetup) -> None:
    """Print on the first rank where the training is resumed."""
    position, division = resume.position, setup.training.division
    if comm.rank() == 0 and setup.arguments["verbose"] != 0 and position is not None:
        rows = ""
        if position.step and division is not None:
            rows = f", after {division.begin:,} of {division.total:,} {division.unit}"
        say(f"resumed in epoch {position.epoch + 1}{rows}, from {resume.folder.path}")
