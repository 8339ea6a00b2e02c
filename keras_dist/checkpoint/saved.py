"""The content of a checkpoint, and how all ranks get it when a training begins."""

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
    """The content of a checkpoint. Names of the fields are names in the file format.

    Args:
        position: Epoch and row that the training had reached.
        seed: Seed of the order of the rows.
        is_finished: Whether the training was stopped, for example by EarlyStopping.
        rates: How far each optimizer's learning rate has come: `rate_progress`.
        warmup_steps: Length of the learning rate's warm-up.
        callbacks: State of each callback on the first rank.
        ranks: For each rank, the state that differs from the first rank's.
        model: Layers, optimizers and shapes that the model must have.
        arrays: Weights and optimizer state; on the first rank only.
    """

    position: sharding.DataPosition
    seed: int
    is_finished: bool
    rates: list[dict[str, float]]
    warmup_steps: int
    callbacks: dict[str, Any]
    ranks: list[Any]
    model: dict[str, Any]
    arrays: list[Any]

    def tree(self) -> dict[str, Any]:
        """The content as a tree for a checkpoint file."""
        # The position is called "place" in files since 0.1.0.
        own = {name: value for name, value in vars(self).items() if name != "position"}
        own["place"] = asdict(self.position)
        return {"keras_dist": __version__, **own}

    @classmethod
    def of(cls, tree: dict[str, Any]) -> "Saved":
        """Invert `tree`."""
        own = {
            n: value for n, value in tree.items() if n not in ("keras_dist", "place")
        }
        return cls(position=sharding.DataPosition(**tree["place"]), **own)


@dataclass(frozen=True)
class Resume:
    """The folder and interval of checkpoints, and the checkpoint to resume from.

    Args:
        folder: The folder of the checkpoints; used by the first rank only.
        save_steps: Save after this many steps; `None` for not.
        save_seconds: Save after this many seconds; `None` for not.
        seed: Seed of the order of the rows.
        saved: The checkpoint to resume from; `None` for a new training.
    """

    folder: Folder
    save_steps: int | None
    save_seconds: float | None
    seed: int
    saved: Saved | None

    @property
    def position(self) -> sharding.DataPosition | None:
        """Epoch and row to resume from; `None` for a new training."""
        return self.saved.position if self.saved is not None else None

    def placed(self, spec: sharding.ShardSpec) -> sharding.ShardSpec:
        """`spec` with the seed and position to resume from."""
        return replace(
            spec, seed=self.seed, keeps_position=True, position=self.position
        )


def opened(options: Options, callbacks: Any, seed: int) -> Resume | None:
    """Read the newest checkpoint on the first rank, and broadcast it.

    Args:
        options: Options of the fit.
        callbacks: The user's callbacks.
        seed: Seed of the order of the rows in a new training.

    Returns:
        `None` if the option `resume` is not given.

    Raises:
        ValueError: On all ranks, if an argument is invalid or differs between the
            ranks, or if all checkpoints are damaged.
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
    # Without the weights, which are broadcast when the model is built.
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
        raise ValueError(str(error)) from None  # a type that all ranks can raise
    except OSError as error:
        raise RuntimeError(
            "Checkpoints cannot be written to the folder that `resume` names. "
            f"Received: resume={folder.path!r}, {error}. Pass a folder that the first "
            "rank can write to."
        ) from error


def _check(options: Options, callbacks: Any) -> None:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    flat: Sequence[Any] = keras.tree.flatten(callbacks or [])
    if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in flat):
        raise ValueError(
            "`resume` and BackupAndRestore would both restore the model. Received: "
            f"resume={os.fspath(options.resume or '')!r} and a BackupAndRestore in "
            "`callbacks`. Leave the callback out."
        )
    steps, seconds = options.save_steps, options.save_seconds
    is_whole = steps is None or (isinstance(steps, int) and steps > 0)
    if not is_whole or not (seconds is None or seconds > 0):
        raise ValueError(
            "`save_steps` must be an integer of at least 1, `save_seconds` a number "
            "above 0, and each may be None. Received: "
            f"save_steps={steps!r}, save_seconds={seconds!r}"
        )
