"""Commits that outlive their process, under `keras-dist run`.

It starts all ranks anew when one has failed, or when hosts have come or left. So on
each host one rank keeps the last commit in a file of the job, as Horovod's elastic mode
keeps it in the memory of processes that go on.
"""

import os
import pickle
import tempfile
from pathlib import Path
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
    return _folder() is not None


def save(commit: Commit, state: int) -> None:
    """Write a commit, on one rank of each host, whole or not at all.

    Args:
        commit: The commit.
        state: Number of the state, by which it is found.

    Raises:
        OSError: If the folder for temporary files cannot be written.
    """
    folder = _folder()
    if folder is None or comm.local_rank() != 0:
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    new = folder / f"{state}.new"
    new.write_bytes(pickle.dumps(tuple(commit)))
    os.replace(new, folder / str(state))


def saved(state: int) -> Commit | None:
    """The last commit of an earlier start of the job on this host, if there is one.

    Args:
        state: Number of the state.
    """
    folder = _folder()
    if folder is None or assignment.RESTART not in os.environ:
        return None
    path = folder / str(state)
    is_own = path.is_file() and folder.stat().st_uid == os.getuid()
    return Commit(*pickle.loads(path.read_bytes())) if is_own else None


def _folder() -> Path | None:
    """The folder of this job on this host; `None` under other launchers."""
    prefix = processes.mark("")
    jobs = [name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)]
    if not jobs:
        return None
    # Of jobs inside of each other the last. What is behind its id is the number of the
    # host's agent. The launcher removes what begins so.
    job = jobs[-1].partition("_")[0]
    return Path(tempfile.gettempdir()) / f"keras_dist.{job}.commits"
