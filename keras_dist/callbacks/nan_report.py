"""What was in the batch whose gradients are not finite."""

import contextlib
import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_dist import comm, optimizer
from keras_dist.callbacks.nan_origin import Origin, named_arrays, origin_of
from keras_dist.training import atomic_save, step
from keras_dist.training.session import session_of

ACTIONS = ("stop", "raise", "skip")

# Of more, no files are kept and no lines are printed: they might be all steps.
_LIMIT = 10


@dataclass(frozen=True)
class NotFinite:
    """One rank's gradients that are not finite.

    Args:
        rank: Whose; -1 if no rank's own are, but their sum is too large.
        epoch, step: As callbacks count them, from 0.
        layer: The first layer, in the order of the forward pass, whose output is not
            finite; where all outputs are, the layer nearest to the loss of those whose
            gradients are not.
        is_output: Whether it is its output.
        inputs: Arrays of the batch that are not finite, such as `"x"`.
        rows: The rows that are to blame, by number in the arrays given to `dist_fit`;
            where those are not known, by place in the batch. Empty if nobody can tell.
        is_numbered: Whether `rows` are numbers in the arrays.
        batches: Numbers of the batches in data that comes in batches.
        file: Where the batch is kept, if it is.
        trouble: Why it is not.
    """

    rank: int
    epoch: int
    step: int
    layer: str = ""
    is_output: bool = False
    inputs: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    is_numbered: bool = False
    batches: tuple[int, ...] = ()
    file: str | None = None
    trouble: str = ""

    def __str__(self) -> str:
        begin = f"Epoch {self.epoch + 1}, step {self.step + 1}: "
        if self.rank < 0:
            return f"{begin}the gradients of all ranks together overflow."
        text = f"{begin}the gradients of rank {self.rank} are not finite, "
        if self.is_output:
            text += f"nor is, as the first output, that of layer `{self.layer}`."
        else:
            text += (
                "while all outputs are; nearest to the loss are those of layer "
                f"`{self.layer}`."
            )
        if self.inputs:
            named = " and ".join(f"`{name}`" for name in self.inputs)
            text += f" Not finite in the data: {named}."
        if self.rows:
            where = "of the data" if self.is_numbered else "of its batch"
            text += f" To blame: {_counted('row', self.rows)} {where}, counted from 0."
        if self.batches:
            text += f" It read {_counted('batch', self.batches)} of the data."
        return text + (f" Kept in {self.file}." if self.file else self.trouble)


class NanReport(keras.callbacks.Callback):
    """Says where a gradient that is not finite comes from, and keeps its batch.

    One row of the data, on one rank, is enough: averaged, its gradient makes all
    weights on all ranks NaN, and who was it cannot be seen any more. This callback
    looks at the average before it is applied (one pass over it a step, and no
    collective), and where it is not finite each rank looks at its own part. The update
    is left out on all ranks: weights, the optimizer's state, metrics and moving
    statistics stay what they were before this batch.

    The batch is written on the rank that it is of, to `folder`, as a `.npz` file
    without pickled objects: `x`, `y`, `sample_weight` (`x.name` or `x.0` where there
    are several), and `rows`, the number of each of its rows in the arrays given to
    `dist_fit`. After ten hits of a fit no more files are written.

    The layer is found by another forward pass over the batch, as for a prediction, with
    the weights that the model has when the callback is called: with
    `steps_per_execution`, those after several steps.

    With a loss scale (mixed precision in float16) gradients that are not finite are how
    the scale is found, and its optimizer leaves those updates out. They are reported,
    and `action` is taken, only where an output of the model or the data is not finite.

    With `gradient_accumulation_steps` the ranks talk after each batch. The gradients of
    each rank are kept in memory until the average has been looked at. The loss that is
    logged for the batch is the one that was computed: a `TerminateOnNaN` stops.

    Args:
        action: What happens on all ranks after the report. `"stop"`: training stops
            after this step; `"raise"`: an error; `"skip"`: training goes on.
        folder: For the batches that are kept; it is made when it is needed.

    Attributes:
        found: A `NotFinite` for each report, the same on all ranks.

    Raises:
        ValueError: If `action` is unknown, or is not the same on all ranks; or if the
            ranks do not average their gradients in each step (`sync`).
        FloatingPointError: On all ranks, if `action` is `"raise"`.

    >>> NanReport("skip").action
    'skip'
    """

    def __init__(
        self, action: str = "stop", folder: str | os.PathLike[str] = "nan_report"
    ) -> None:
        super().__init__()
        if action not in ACTIONS:
            raise ValueError(
                '`action` must be "stop", "raise" or "skip". '
                f"Received: action={action!r}"
            )
        self.action = action
        self.folder = os.fspath(folder)
        self.found: list[NotFinite] = []
        self._guard: optimizer.Guard
        self._epoch = 0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        found = optimizer.optimizers_of(model)
        if comm.size() > 1 and any(map(optimizer.uses_local_sgd, found)):
            raise ValueError(
                "NanReport looks at gradients that are averaged in each step. "
                "Received: ranks that make steps of their own. Pass "
                'sync="every:1", or take keras.callbacks.TerminateOnNaN.'
            )
        self._guard = optimizer.Guard()
        step.install(model).instruments.watch(self._guard)
        for each in found:
            optimizer.watch(each)

    def on_train_begin(self, logs: Any = None) -> None:
        self.found = []
        comm.agree(
            {"NanReport": f"action={self.action!r}"},
            advice="Give the same NanReport to every rank.",
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._guard.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # All ranks have the same hits, since all have the same average.
        if hits := self._guard.take():
            everyone = comm.gather_or_raise(
                lambda: [self._look_at(hit) for hit in hits]
            )
            for hit, looks in zip(hits, zip(*everyone, strict=True), strict=True):
                self._act(hit, [look for look in looks if look is not None])

    def on_train_end(self, logs: Any = None) -> None:
        for found in optimizer.optimizers_of(self.model):
            optimizer.unwatch(found)
        session_of(self.model).instruments.watch(None)
        step.uninstall(self.model)

    def _act(self, hit: optimizer.Hit, found: list[NotFinite]) -> None:
        if not found and hit.is_handled:  # the loss scale was too large
            return
        found = found or [NotFinite(-1, self._epoch, hit.step)]
        is_reported = len(self.found) < _LIMIT
        self.found += found
        ends = {"stop": "training stops", "raise": "this error ends it", "skip": ""}
        message = " ".join(map(str, found)) + " The update was left out on all ranks"
        message += f"; {ends[self.action]}." if ends[self.action] else "."
        if self.action == "raise":
            raise FloatingPointError(message)
        if comm.rank() == 0 and is_reported:
            more = " This is the last one that is reported."
            is_last = len(self.found) >= _LIMIT
            warnings.warn(message + more * is_last, stacklevel=2)
        if self.action == "stop":
            # At once, since every rank is here; the epoch's end asks for the wish.
            self.model.stop_training = True
            session_of(self.model).stop_request.grant(self.model, is_granted=True)

    def _look_at(self, hit: optimizer.Hit) -> NotFinite | None:
        """What this rank knows of a hit; `None` if it was another rank's."""
        if hit.batch is None:
            return None
        origin = origin_of(self.model, hit.batch, hit.paths)
        if hit.is_handled and not (origin.is_output or origin.inputs):
            return None
        rows, batches = self._read_at(hit)
        indices = list(origin.indices)
        is_numbered = rows is not None and bool((rows[indices] >= 0).all())
        file, trouble = None, ""
        if len(self.found) < _LIMIT:
            file, trouble = self._keep(hit, rows, origin)
        return NotFinite(
            rank=comm.rank(),
            epoch=self._epoch,
            step=hit.step,
            layer=origin.layer,
            is_output=origin.is_output,
            inputs=origin.inputs,
            rows=tuple(rows[indices].tolist() if is_numbered else indices),
            is_numbered=is_numbered,
            batches=tuple(batches),
            file=file,
            trouble=trouble,
        )

    def _read_at(self, hit: optimizer.Hit) -> tuple[Any, Sequence[int]]:
        """Numbers of the rows that were read, or of the batches, where known."""
        feed = session_of(self.model).training.feed
        rows, batches = None, ()
        with contextlib.suppress(Exception):  # a report is no reason to end a training
            if feed is not None and feed.rows_at is not None:
                rows = feed.rows_at(self._epoch, hit.step, hit.batch)
                read = next(iter(named_arrays(hit.batch).values()))
                rows = rows if len(rows) == len(read) else None
            if feed is not None and feed.batches_at is not None:
                batches = feed.batches_at(self._epoch, hit.step)
        return rows, batches

    def _keep(
        self, hit: optimizer.Hit, rows: Any, origin: Origin
    ) -> tuple[str | None, str]:
        arrays = {n: _plain(array) for n, array in named_arrays(hit.batch).items()}
        if rows is not None:
            arrays["rows"] = rows
        arrays["places_to_blame"] = np.array(origin.indices, np.int64)
        name = f"epoch{self._epoch + 1}_step{hit.step + 1}_rank{comm.rank()}.npz"
        path = os.path.join(self.folder, name)
        try:
            os.makedirs(self.folder, exist_ok=True)
            atomic_save.replace(path, functools.partial(_write, arrays))
        except OSError as error:
            return None, f" Its batch could not be kept: {error}."
        return path, ""


def _write(arrays: dict[str, Any], path: str) -> None:
    np.savez(path, **arrays)  # none holds objects


def _plain(array: np.ndarray) -> np.ndarray:
    """In a dtype that a file can hold without pickling."""
    if array.dtype.kind == "O":
        return array.astype(np.bytes_)
    is_known = array.dtype.kind in "biufcSU"
    return array if is_known else array.astype(np.float32)


def _counted(noun: str, numbers: Sequence[int]) -> str:
    """Numbers in words, the first ten.

    >>> _counted("row", (3,)), _counted("batch", (3, 4))
    ('row 3', 'batches 3 and 4')
    """
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    shown = [str(number) for number in numbers[:_LIMIT]]
    if len(numbers) > _LIMIT:
        shown.append(f"{len(numbers) - _LIMIT} more")
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{plural} {', '.join(shown[:-1])} and {shown[-1]}"
