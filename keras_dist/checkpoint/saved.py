"""What a folder tells all ranks when a training begins."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import keras

from keras_dist import comm, sharding
from keras_dist.checkpoint.files import DamagedError, Folder
from keras_dist.setup.options import Options
from keras_dist.version import __version__

_ADVICE = "Start every rank with the same arguments."


@dataclass(frozen=True)
class Saved:
    """A checkpoint, as all ranks know it.

    Args:
        position: Where the training had come to.
        seed: Of the order of the rows.
        is_finished: Whether it had stopped by itself.
        rates: How far the learning rate of each optimizer has come.
        warmup_steps: Of the learning rate.
        callbacks: State of each callback of the first rank.
        ranks: What each rank had of its own.
        model: What the model must be.
        arrays: Weights and optimizer state; on the first rank only.
    """

    position: sharding.Position
    seed: int
    is_finished: bool
    rates: list[dict[str, float]]
    warmup_steps: int
    callbacks: dict[str, Any]
    ranks: list[Any]
    model: dict[str, Any]
    arrays: list[Any]

    def tree(self) -> dict[str, Any]:
        """As it is written."""
        # "place": what files written by 0.1.0 have, and go on to be read by.
        own = {name: value for name, value in vars(self).items() if name != "position"}
        own["place"] = asdict(self.position)
        return {"keras_dist": __version__, **own}

    @classmethod
    def of(cls, tree: dict[str, Any]) -> "Saved":
        """From what was written."""
        own = {
            n: value for n, value in tree.items() if n not in ("keras_dist", "place")
        }
        return cls(position=sharding.Position(**tree["place"]), **own)


@dataclass(frozen=True)
class Resume:
    """A training that is kept in a folder, and perhaps goes on from there.

    Args:
        folder: Where; used by the first rank only.
        save_steps: Steps from checkpoint to checkpoint, if any.
        save_seconds: Seconds from checkpoint to checkpoint, if any.
        seed: Of the order of the rows.
        saved: What the folder holds, if anything.
    """

    folder: Folder
    save_steps: int | None
    save_seconds: float | None
    seed: int
    saved: Saved | None

    @property
    def position(self) -> sharding.Position | None:
        """Where the training has come to, if it goes on."""
        return self.saved.position if self.saved is not None else None

    def placed(self, split: sharding.Split) -> sharding.Split:
        """How data is divided by a training that goes on."""
        return replace(
            split, seed=self.seed, keeps_position=True, position=self.position
        )


def opened(options: Options, callbacks: Any, seed: int) -> Resume | None:
    """Read the folder, on the first rank, for all of them.

    Args:
        options: Of the fit; `None` where it names no folder.
        callbacks: The user's.
        seed: Of the order of the rows, where nothing goes on.

    Raises:
        ValueError: On all ranks, if an argument is unusable, or differs between the
            ranks, or all checkpoints are damaged.
        RuntimeError: On all ranks, if the folder cannot be written to.
    """
    names = ("resume", "save_steps", "save_seconds")
    given = {f"`{name}`": getattr(options, name) for name in names}
    comm.agree({name: str(value) for name, value in given.items()}, advice=_ADVICE)
    if options.resume is None:
        return None
    path = os.path.abspath(os.path.expanduser(os.fspath(options.resume)))
    folder = Folder(path)

    def read() -> tuple[Any, list[str]]:
        _check(options, callbacks)
        return _read(folder) if comm.rank() == 0 else (None, [])

    tree, damaged = comm.run_on_all(read)
    if damaged:
        warnings.warn(
            f"A checkpoint is damaged, and an older one is used: {'; '.join(damaged)}",
            stacklevel=2,
        )
    # Weights are copied to the other ranks when they are built.
    small = None if tree is None else {**tree, "arrays": []}
    agreed = comm.broadcast(small)
    saved = None if agreed is None else Saved.of(agreed if tree is None else tree)
    own_seed = seed if saved is None else saved.seed
    return Resume(folder, options.save_steps, options.save_seconds, own_seed, saved)


def _read(folder: Folder) -> tuple[Any, list[str]]:
    try:
        folder.prepare()
        return folder.newest()
    except DamagedError as error:
        raise ValueError(str(error)) from None  # a kind that all ranks can raise
    except OSError as error:
        raise RuntimeError(
            "Checkpoints cannot be kept in the folder that `resume` names. Received: "
            f"resume={folder.path!r}, {error}. Pass a folder that the first rank can "
            "write to."
        ) from error


def _check(options: Options, callbacks: Any) -> None:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    every: Sequence[Any] = keras.tree.flatten(callbacks or [])
    if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in every):
        raise ValueError(
            "`resume` and BackupAndRestore would both restore the model. Received: "
            f"resume={os.fspath(options.resume or '')!r} and a BackupAndRestore in "
            "`callbacks`. Leave the callback out."
        )
    steps, seconds = options.save_steps, options.save_seconds
    is_whole = steps is None or (isinstance(steps, int) and steps > 0)
    if not is_whole or not (seconds is None or seconds > 0):
        raise ValueError(
            "`save_steps` must be a whole number of at least 1, `save_seconds` more "
            "than 0, or None for neither. Received: "
            f"save_steps={steps!r}, save_seconds={seconds!r}"
        )
