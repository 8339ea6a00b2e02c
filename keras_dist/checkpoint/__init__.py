"""A training that was ended goes on where it was."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist import comm
from keras_dist.checkpoint.callback_states import with_history
from keras_dist.checkpoint.save_request import SaveRequests
from keras_dist.checkpoint.saved import Resume, opened
from keras_dist.checkpoint.saver import EXIT_CODE, Saver, saves_within_epochs
from keras_dist.checkpoint.writer import Writer
from keras_dist.setup.job import Job

__all__ = ["EXIT_CODE", "Resume", "saving", "opened"]


@contextlib.contextmanager
def saving(resume: Resume | None, job: Job) -> Iterator[dict[str, Any]]:
    """Inside the block, a fit saves as it goes; and it begins where it has to.

    Args:
        resume: The folder, and what it holds; `None` to save nothing.
        job: What this rank does.

    Returns:
        The arguments of `Model.fit`.
    """
    if resume is None:
        yield job.arguments
        return
    arguments, saved = dict(job.arguments), resume.saved
    if saved is not None:
        arguments["initial_epoch"] = _first_epoch(resume, job)
        _say_where(resume, job)
        for callback in job.callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
    listed = with_history(arguments["callbacks"])
    found = [c for c in listed if isinstance(c, keras.callbacks.History)]
    others = [c for c in job.callbacks if not isinstance(c, keras.callbacks.History)]
    requests = SaveRequests(resume.save_seconds if saves_within_epochs(job) else None)
    writer = Writer(resume.folder) if comm.rank() == 0 else None
    saver = Saver(resume, job, others + found, requests, writer)
    try:
        yield arguments | {"callbacks": [*listed, saver]}
    finally:
        requests.finish()
        if writer is not None:
            writer.close()
            saver.report_failure()


def _first_epoch(resume: Resume, job: Job) -> int:
    saved = resume.saved
    assert saved is not None
    if saved.is_finished:
        return int(job.arguments["epochs"])
    schedule = job.training.schedule
    if saved.position.done and schedule is None:
        raise ValueError(
            "The training cannot go on in the middle of an epoch with this data. "
            f"Received: {job.training.kind}, and a checkpoint of the middle of an "
            "epoch. Pass the same data as before, or an empty folder."
        )
    if (
        schedule is not None
        and schedule.epoch > saved.position.epoch
        and comm.rank() == 0
    ):
        warnings.warn(
            f"Of epoch {saved.position.epoch + 1} fewer rows were left than there are "
            "ranks. They are left out, and `History` has no entry for it.",
            stacklevel=2,
        )
    return saved.position.epoch if schedule is None else schedule.epoch


def _say_where(resume: Resume, job: Job) -> None:
    position = resume.position
    if comm.rank() == 0 and job.arguments["verbose"] != 0 and position is not None:
        rows = (
            f", after {position.row:,} of {position.num_rows:,} rows"
            if position.done
            else ""
        )
        print(
            f"goes on in epoch {position.epoch + 1}{rows}, from {resume.folder.path}",
            flush=True,
        )
