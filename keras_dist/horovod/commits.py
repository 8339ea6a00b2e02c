"""Commits that outlive their process, under `keras-dist run`.

It starts all ranks anew when one has failed, or when hosts have come or left. So on
each host one rank keeps the last commit in a file of the job, as Horovod's elastic mode
keeps it in the memory of processes that go on.
"""

import os
import pickle
import tempfile
from typing import Any, NamedTuple

import numpy as np

from keras_dist import comm
from keras_dist.launch import assignment, processes


class Commit(NamedTuple):
    """What was committed.

    Args:
        number: How many commits there were, with this one.
        arrays: Weights of the model, and variables of its optimizer.
        values: The other values, by their names.
    """

    number: int
    arrays: list[np.ndarray]
    values: dict[str, Any]


def are_saved() -> bool:
    """Whether the launcher is one that may start the ranks anew."""
    return _job() is not None


def save(commit: Commit, state: int) -> None:
    """Write a commit, on one rank of each host, whole or not at all.

    Args:
        commit: The commit.
        state: Number of the state, by which it is found.

    Raises:
        OSError: If the folder for temporary files cannot be written.
    """
    job = _job()
    if job is None or comm.local_rank() != 0:
        return
    folder = processes.make_lasting_folder(job)
    descriptor, new = tempfile.mkstemp(dir=folder)  # a new file, and no link
    with open(descriptor, "wb") as file:
        pickle.dump(tuple(commit), file)
    os.replace(new, folder / str(state))


def saved(state: int) -> Commit | None:
    """The last commit of an earlier start of the job on this host, if there is one.

    Args:
        state: Number of the state.
    """
    job = _job()
    if job is None or assignment.RESTART not in os.environ:
        return None
    folder = processes.lasting_folder(job)
    if folder is None or not (folder / str(state)).is_file():
        return None
    return Commit(*pickle.loads((folder / str(state)).read_bytes()))


def _job() -> str | None:
    """The id of this job; `None` under other launchers."""
    prefix = processes.mark("")
    jobs = [name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)]
    if not jobs:
        return None
    # Of jobs inside of each other the last. What is behind its id is the number of the
    # host's agent, of which each start has another one.
    return jobs[-1].partition("_")[0]
