"""The content of a checkpoint, and how other numbers of ranks continue from it."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import keras

from keras_dist import comm
from keras_dist.checkpoint.files import Folder
from keras_dist.checkpoint.lock import locked
from keras_dist.checkpoint.newest import Copies, explained, find_copies, read_newest
from keras_dist.data import DataPosition, ShardSpec
from keras_dist.report.plan import Plan
from keras_dist.setup.arguments import Options
from keras_dist.setup.fit_setup import FitSetup
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
        begun: When the training began, in seconds since 1970; 0 in files of before.
        scale: Ranks, global batch and learning rates; `None` in files of before.
        keras_seed: The seed with which Keras shuffles arrays; `None` if it draws one,
            and in files of before.
        data_seeds: The seeds of a data set's shuffles, if the position depends on them.
    """

    position: DataPosition
    seed: int
    is_finished: bool
    rates: list[dict[str, float]]
    warmup_steps: int
    callbacks: dict[str, Any]
    ranks: list[Any]
    model: dict[str, Any]
    arrays: list[Any]
    begun: float = 0.0
    scale: dict[str, Any] | None = None
    keras_seed: int | None = None
    data_seeds: list[tuple[int, int]] | None = None

    def tree(self) -> dict[str, Any]:
        """Return the content as a tree for a checkpoint file."""
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
        return cls(position=DataPosition(**tree["place"]), **own)


@dataclass(frozen=True)
class Resume:
    """The folder and interval of checkpoints, and the checkpoint to resume from.

    Args:
        folder: The folder of the checkpoints; used by ranks that write only.
        copies: The folders that its path stands for on all ranks, and who writes.
        save_steps: Save after this many steps; `None` for not.
        save_seconds: Save after this many seconds; `None` for not.
        seed: Seed of the order of the rows.
        keras_seed: The seed with which Keras shuffles arrays; `None` if it draws one.
        begun: When the training began, in seconds since 1970.
        saved: The checkpoint to resume from; `None` for a new training.
        source: The host from which the checkpoint was sent to others, if it was.
    """

    folder: Folder
    copies: Copies
    save_steps: int | None
    save_seconds: float | None
    seed: int
    keras_seed: int | None
    begun: float
    saved: Saved | None
    source: str = ""

    @property
    def position(self) -> DataPosition | None:
        """Epoch and row to resume from; `None` for a new training."""
        return self.saved.position if self.saved is not None else None

    def placed(self, spec: ShardSpec) -> ShardSpec:
        """`spec` with the seed and position to resume from."""
        return replace(
            spec,
            seed=self.seed,
            keras_seed=self.keras_seed,
            seeds_before=None if self.saved is None else self.saved.data_seeds,
            keeps_position=True,
            position=self.position,
        )

    def compared(self, setup: FitSetup) -> FitSetup:
        """`setup` with a plan that says where a resume goes on and what changed."""
        plan = replace(setup.plan, resume=setup.resume_in_words)
        if self.saved is not None:
            found = changes(self.saved.scale, scale_of(setup.plan))
            plan = replace(plan, changes=found)
        return replace(setup, plan=plan)


@contextlib.contextmanager
def opened(
    options: Options, callbacks: Any, seed: int, keras_seed: int | None
) -> Iterator[Resume | None]:
    """Read the newest checkpoint, and broadcast it from the first rank.

    Inside the block, no other training writes to the folder.

    Args:
        options: Options of the fit.
        callbacks: The user's callbacks.
        seed: Seed of the order of the rows in a new training.
        keras_seed: The seed with which Keras shuffles arrays in it; `None` if it draws
            one.

    Yields:
        `None` if the option `resume` is not given.

    Raises:
        ValueError: On all ranks, if an argument is invalid or differs between the
            ranks, or if all checkpoints are damaged.
        RuntimeError: On all ranks, if a folder cannot be written to, or if another
            training does so.
    """
    names = ("resume", "save_steps", "save_seconds")
    given = {f"`{name}`": getattr(options, name) for name in names}
    comm.agree({name: str(value) for name, value in given.items()}, advice=_ADVICE)
    if options.resume is None:
        yield None
        return
    path = os.path.abspath(os.path.expanduser(os.fspath(options.resume)))
    folder = Folder(path)
    comm.run_on_all(lambda: _check(options, callbacks))
    copies = find_copies(folder)
    with locked(folder, copies):
        comm.run_on_all(
            lambda: explained(path, folder.prepare) if copies.is_writer else None
        )
        yield _read(options, folder, copies, seed, keras_seed)


def _read(
    options: Options,
    folder: Folder,
    copies: Copies,
    seed: int,
    keras_seed: int | None,
) -> Resume:
    tree, source = read_newest(folder, copies)
    # Without the weights, which are broadcast when the model is built.
    small = None if tree is None else {**tree, "arrays": []}
    agreed, now = comm.broadcast((small, time.time()))
    saved = None if agreed is None else Saved.of(agreed if tree is None else tree)
    return Resume(
        folder,
        copies,
        options.save_steps,
        options.save_seconds,
        seed=seed if saved is None else saved.seed,
        keras_seed=keras_seed if saved is None else saved.keras_seed,
        begun=now if saved is None else saved.begun,
        saved=saved,
        source=source,
    )


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


def scale_of(plan: Plan) -> dict[str, Any]:
    """Collect what depends on the number of ranks, by the names of the file format.

    Args:
        plan: The plan of a fit.

    Returns:
        `ranks`; `batch`, the rows of a global batch, or `None` where the data decides
        it; `rates`, the scaled learning rate of each optimizer, as the plan shows it.
    """
    return {
        "ranks": plan.size,
        "batch": plan.global_batch,
        "rates": [rate.after for rate in plan.rates],
    }


def changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Describe for the plan what has changed since; "" if nothing is known.

    >>> before = {"ranks": 3, "batch": 96, "rates": ["0.003"]}
    >>> changes(before, {"ranks": 2, "batch": 64, "rates": ["0.002"]})
    'ranks 3 → 2, global batch 96 → 64, learning rate 0.003 → 0.002'
    >>> changes(before, {"ranks": 2, "batch": 96, "rates": ["0.003"]})
    'ranks 3 → 2'

    Args:
        before: Of the checkpoint; `None` if it was written by an earlier version.
        now: Of this fit.
    """
    if not before:
        return ""
    pairs = [(name, before.get(name), now[name]) for name in ("ranks", "batch")]
    rates = [(before.get("rates") or []), now["rates"]]
    if len(rates[0]) == len(rates[1]):
        pairs += [("rates", *pair) for pair in dict.fromkeys(zip(*rates, strict=True))]
    words = {"batch": "global batch", "rates": "learning rate"}
    return ", ".join(
        f"{words.get(name, name)} {_text(old)} → {_text(new)}"
        for name, old, new in pairs
        if old is not None and new is not None and old != new
    )


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
