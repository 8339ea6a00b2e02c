"""The content of a checkpoint, and how other numbers of ranks continue from it."""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from keras_dist import comm
from keras_dist.checkpoint.files import Folder
from keras_dist.data.division import DataPosition, ReadContext
from keras_dist.lines import warn
from keras_dist.setup.arguments import Options
from keras_dist.version import __version__

_ADVICE = "Start every rank with the same arguments."

# Seconds between the times that a rank looks for what the first one has written: a
# network file system may show it late.
_WAITS = (0, 0.1, 0.2, 0.5, 1)


@dataclass(frozen=True)
class Saved:
    """The content of a checkpoint. Names of the fields are names in the file format.

    Args:
        position: What the training had reached.
        data: What a position in the middle of an epoch depends on: `Division.facts`;
            empty for data that has no such position.
        seed: Seed of the order of the rows.
        is_finished: Whether the training was stopped, for example by EarlyStopping.
        rates: How far each optimizer's learning rate has come: `rate_progress`.
        warmup_steps: Length of the learning rate's warm-up.
        callbacks: State of each callback on the first rank.
        ranks: For each rank, the state that differs from the first rank's.
        model: Optimizers and shapes that the model must have.
        arrays: Weights and optimizer state; on the first rank only.
        keras_seed: The seed with which Keras shuffles arrays; `None` if it draws one.
    """

    position: DataPosition
    data: dict[str, Any]
    seed: int
    is_finished: bool
    rates: list[dict[str, float]]
    warmup_steps: int
    callbacks: dict[str, Any]
    ranks: list[Any]
    model: list[str]
    arrays: list[Any]
    keras_seed: int | None = None

    def tree(self) -> dict[str, Any]:
        """Return the content as a tree for a checkpoint file."""
        position = asdict(self.position)
        return {"keras_dist": __version__, **vars(self), "position": position}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "Saved":
        """Invert `tree`."""
        own = {name: value for name, value in tree.items() if name != "keras_dist"}
        return cls(**{**own, "position": DataPosition(**own["position"])})


@dataclass(frozen=True)
class Resume:
    """The folder of checkpoints, and the checkpoint to resume from.

    Args:
        folder: The folder of the checkpoints, which the first rank reads and writes.
        options: Options of the fit.
        context: How data is divided, with the seeds and the position to resume from.
        saved: The checkpoint to resume from; `None` for a new training.
    """

    folder: Folder
    options: Options
    context: ReadContext
    saved: Saved | None


@contextlib.contextmanager
def open_checkpoints(options: Options, context: ReadContext) -> Iterator[Resume | None]:
    """Context manager that reads the newest checkpoint, and locks the folder.

    Args:
        options: Options of the fit.
        context: How data is divided among the ranks in a new training.

    Yields:
        `None` if the option `resume` is not given.

    Raises:
        ValueError: On all ranks, if an argument differs between the ranks, or if all
            checkpoints are damaged.
        RuntimeError: On all ranks, if the folder cannot be written to, if another
            training does so, or if a rank does not see what the first one writes.
    """
    names = ("resume", "save_steps", "save_seconds")
    facts = {f"`{name}`": str(getattr(options, name)) for name in names}
    comm.agree(facts, advice=_ADVICE)
    if options.resume is None:
        yield None
        return
    if re.match(r"[a-zA-Z][\w+.-]*://", os.fspath(options.resume)):
        raise ValueError(
            "`resume` must be a folder of a file system that all hosts have mounted, "
            f"not a URL. Received: resume={os.fspath(options.resume)!r}. Mount the "
            "bucket, for example with gcsfuse or mountpoint-s3, and pass its path."
        )
    path = os.path.abspath(os.path.expanduser(os.fspath(options.resume)))
    folder = Folder(path)
    with contextlib.ExitStack() as stack:
        with on_first_rank(path) as is_first:
            if is_first:
                stack.enter_context(folder.lock())
        _check_shared(path)
        yield _read(options, folder, context)


def _read(options: Options, folder: Folder, context: ReadContext) -> Resume:
    tree: Any = None
    damaged: list[str] = []
    with on_first_rank(folder.path) as is_first:
        if is_first:
            tree, damaged = folder.newest()
    if damaged:
        warn(f"A checkpoint is damaged, and an older one is used: {'; '.join(damaged)}")
    # Without the weights, which are broadcast when the model is built.
    small = comm.broadcast(None if tree is None else {**tree, "arrays": []})
    saved = None if small is None else Saved.from_tree(small if tree is None else tree)
    context = replace(context, keeps_position=True)
    if saved is not None:
        context = replace(
            context,
            seed=saved.seed,
            keras_seed=saved.keras_seed,
            position=saved.position,
            facts_before=saved.data,
        )
    return Resume(folder, options, context, saved)


@contextlib.contextmanager
def on_first_rank(path: str) -> Iterator[bool]:
    """Context manager for work in the folder, before the next exchange of all ranks.

    Yields:
        Whether this is the first rank, which does the work.

    Raises:
        ValueError: On all ranks, if all checkpoints are damaged.
        RuntimeError: On all ranks, if the folder cannot be read or written to.
    """
    with comm.raise_on_all():
        try:
            yield comm.rank() == 0
        except OSError as error:
            raise RuntimeError(
                "Checkpoints cannot be read or written in the folder that `resume` "
                f"names. Received: resume={path!r} on host {os.uname().nodename}, "
                f"{error}. Pass a folder that the first rank can read and write."
            ) from error


def _check_shared(path: str) -> None:
    """Check that all ranks see what the first one writes; all ranks call this.

    A full disk is an error now, and not after the first epoch.

    The ranks of the next start may be on other hosts: any of them may be the first one.
    """
    # A new name each time: a file system may cache what is not there.
    name = f".checkpoint.{uuid.uuid4().hex}.marker"
    with on_first_rank(path) as is_first, contextlib.ExitStack() as stack:
        if is_first:
            with open(marker := os.path.join(path, name), "xb") as file:
                stack.callback(os.remove, marker)  # an error does so at once
                file.write(os.urandom(4096))  # as a small checkpoint
                file.flush()
                os.fsync(file.fileno())
        written = stack.pop_all()
    marker = os.path.join(path, comm.broadcast(name))  # sent when it is there
    everyone = comm.gather((_sees(marker), os.uname().nodename))
    with on_first_rank(path):
        written.close()
    hosts = [host for is_seen, host in everyone if not is_seen]
    if hosts:
        raise RuntimeError(
            "The folder that `resume` names must be one that all hosts share: a "
            "training may continue with its first rank on another host. Received: "
            f"resume={path!r}, where a file that the first rank has written on host "
            f"{everyone[0][1]} is not seen by {len(hosts)} of {len(everyone)} ranks, "
            f"on {', '.join(dict.fromkeys(hosts))}. Pass a folder on a file system "
            "that is mounted on all hosts, with the same path."
        )


def _sees(path: str) -> bool:
    for seconds in _WAITS:
        time.sleep(seconds)
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(path))  # NFS then asks the server what is new
        if os.path.exists(path):
            return True
    return False
