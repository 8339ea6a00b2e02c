"""Report gradients that are not finite, and save the batch that they come from."""

import contextlib
import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, optimizer
from keras_dist.training import step
from keras_dist.training.saving import atomic
from keras_dist.training.session import session_of


@dataclass(frozen=True)
class Origin:
    """The origin of numbers that are not finite.

    Args:
        layer: The first layer, in the order of the forward pass, whose output is not
            finite. If all outputs are finite: of the layers whose gradients are not,
            the one nearest to the loss.
        is_output: Whether `layer` was found by its output.
        inputs: Names of the arrays of the batch that are not finite.
        indices: Indices in the batch of the rows that caused it; empty if unknown.
    """

    layer: str
    is_output: bool
    inputs: tuple[str, ...]
    indices: tuple[int, ...]


def origin_of(model: Any, batch: Any, paths: Sequence[str]) -> Origin:
    """Find where the gradients of a batch become not finite.

    The forward pass is run once more, as for a prediction.

    Args:
        model: The model, with the weights before the update.
        batch: The batch, as `train_step` received it.
        paths: Paths of the variables whose gradients are not finite, in the model's
            order.
    """
    inputs, indices = [], set()
    for name, array in named_arrays(batch).items():
        rows = _bad_rows(array)
        if rows is not None and rows.any():
            inputs.append(name)
            indices |= set(np.flatnonzero(rows).tolist())
    try:
        first = _first_output(model, keras.utils.unpack_x_y_sample_weight(batch)[0])
    except Exception:  # the batch of a custom train step may be of any kind
        first = None
    layer = paths[-1].split("/")[-2:][0] if paths else ""
    if first is not None:
        layer, rows = first
        if not indices and rows is not None:
            indices = set(np.flatnonzero(rows).tolist())
    return Origin(layer, first is not None, tuple(inputs), tuple(sorted(indices)))


def named_arrays(batch: Any) -> dict[str, np.ndarray]:
    """Name the arrays of a batch: `x`, `y`, `sample_weight`, or their elements.

    >>> sorted(named_arrays(({"a": np.ones(2), "b": [np.ones(2)]}, np.ones(2))))
    ['x.a', 'x.b.0', 'y']
    """
    found: dict[str, np.ndarray] = {}
    if isinstance(batch, (list, tuple)) and len(batch) <= 3:
        names = ("x", "y", "sample_weight")
        _add(found, "", dict(zip(names, batch, strict=False)))
    else:
        _add(found, "batch" if isinstance(batch, (dict, list, tuple)) else "x", batch)
    return found


def _add(found: dict[str, np.ndarray], name: str, value: Any) -> None:
    prefix = f"{name}." if name else ""
    if value is None:
        return
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        items = list(enumerate(tf.nest.flatten(value, expand_composites=True)))
    else:
        found[name] = np.asarray(value)
        return
    for key, part in items:
        _add(found, f"{prefix}{key}", part)


def _first_output(model: Any, x: Any) -> tuple[str, Any] | None:
    """Find the first layer whose output is not finite, and a mask of rows."""
    found: list[tuple[str, Any]] = []
    keras_call = keras.layers.Layer.__call__

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = keras_call(layer, *args, **kwargs)
        for leaf in keras.tree.flatten(outputs) if not found else ():
            rows = _bad_rows(leaf)
            if rows is not None and rows.any():
                found.append((layer.name, rows if len(rows) == num_rows else None))
                break
        return outputs

    tensors = keras.tree.map_structure(
        lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), x
    )
    leaves = [leaf for leaf in keras.tree.flatten(tensors) if leaf is not None]
    num_rows = len(leaves[0])
    # Every layer is called through this method, also in a custom `call`.
    keras.layers.Layer.__call__ = call
    try:
        model(tensors)
    finally:
        keras.layers.Layer.__call__ = keras_call
    return found[0] if found else None


def _bad_rows(value: Any) -> Any:
    """Mask of the rows with a number that is not finite; `None` if not an array."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        return None
    is_array = isinstance(value, (np.ndarray, tf.Tensor))
    if not is_array or tf.is_symbolic_tensor(value):
        return None
    tensor = tf.convert_to_tensor(value)
    if not tensor.dtype.is_floating or not tensor.shape.rank:
        return None
    is_bad = tf.logical_not(tf.math.is_finite(tensor))
    return tf.reduce_any(is_bad, axis=list(range(1, tensor.shape.rank))).numpy()


Action = Literal["stop", "raise", "skip"]

# Later reports of a fit are neither printed nor saved: they may be one for each step.
_LIMIT = 10


@dataclass(frozen=True)
class NotFinite:
    """A report of `NanReport`: gradients that are not finite on one rank.

    Args:
        rank: The rank; -1 if the gradients of every rank are finite, but their sum is
            not.
        epoch, step: Epoch and step, counted from 0 as in callbacks.
        layer: The first layer, in the order of the forward pass, whose output is not
            finite. If all outputs are finite: of the layers whose gradients are not,
            the one nearest to the loss.
        is_output: Whether `layer` was found by its output.
        inputs: Names of the arrays of the batch that are not finite, such as `"x"`.
        rows: Rows that caused it: indices in the arrays given to `dist_fit`, or, if
            those are unknown, indices in the batch. Empty if the rows are unknown.
        is_numbered: Whether `rows` are indices in the arrays.
        batches: Indices of the batches that were read, for data that comes in batches.
        file: Path of the saved batch; `None` if it is not saved.
        trouble: Why the batch could not be saved, as a sentence for the message.

    Example:

    >>> print(NotFinite(rank=1, epoch=0, step=4, layer="dense", is_output=True))
    Epoch 1, step 5: the gradients of rank 1 are not finite. The first layer whose ...
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
            return f"{begin}the sum of the gradients of all ranks overflows."
        text = f"{begin}the gradients of rank {self.rank} are not finite. "
        if self.is_output:
            text += f"The first layer whose output is not finite: `{self.layer}`."
        else:
            text += (
                "All outputs are finite; the layer nearest to the loss whose gradients "
                f"are not: `{self.layer}`."
            )
        if self.inputs:
            named = " and ".join(f"`{name}`" for name in self.inputs)
            text += f" Not finite in the data: {named}."
        if self.rows:
            of = "of the data" if self.is_numbered else "of its batch"
            text += f" To blame: {_counted('row', self.rows)} {of}, counted from 0."
        if self.batches:
            text += f" The rank read {_counted('batch', self.batches)} of the data."
        return text + (f" Saved in {self.file}." if self.file else self.trouble)


class NanReport(keras.callbacks.Callback):
    """Reports where a gradient that is not finite comes from, and saves its batch.

    One row of the data on one rank is enough to make all weights on all ranks NaN, and
    from the averaged gradient alone nobody can find that row. This callback checks the
    average before it is applied (one pass over it in each step, and no collective). If
    it is not finite, each rank checks its own gradients, and the update is skipped on
    all ranks: weights, the optimizer's state, metrics and moving statistics remain as
    they were before this batch.

    The rank that read the batch saves it in `folder`, as a `.npz` file without pickled
    objects: `x`, `y`, `sample_weight` (`x.name` or `x.0` if there are several), and
    `rows`, the index of each of its rows in the arrays given to `dist_fit`. After ten
    reports of a fit no more files are saved.

    The layer is found by a second forward pass over the batch, as for a prediction,
    with the model's weights at the time of the callback: with `steps_per_execution`,
    those after several steps.

    With a loss scale (mixed precision in float16), gradients that are not finite are
    expected while the scale is adjusted, and the `LossScaleOptimizer` skips these
    updates. They are reported, and `action` is taken, only if an output of the model or
    the data is not finite.

    With `gradient_accumulation_steps` the gradients are averaged after each batch. The
    gradients of each rank remain in memory until the average is checked. The loss in
    the logs of the batch is the one that was computed: `TerminateOnNaN` stops at it.

    Args:
        action: What happens on all ranks after the report. `"stop"`: training stops
            after this step; `"raise"`: an error is raised; `"skip"`: training continues
            with the next batch.
        folder: The folder for saved batches; it is created when it is needed.

    Attributes:
        found: A `NotFinite` for each report, the same on all ranks.

    Raises:
        ValueError: If `action` is unknown, or is not the same on all ranks; or if the
            ranks do not average gradients in each step (`sync="every:k"`).
        FloatingPointError: On all ranks, if `action` is `"raise"`.

    Example:

    >>> NanReport("skip").action
    'skip'
    """

    def __init__(
        self, action: Action = "stop", folder: str | os.PathLike[str] = "nan_report"
    ) -> None:
        super().__init__()
        if action not in get_args(Action):
            raise ValueError(
                '`action` must be "stop", "raise" or "skip". '
                f"Received: action={action!r}"
            )
        self.action = action
        self.folder = os.fspath(folder)
        self.found: list[NotFinite] = []
        self._guard: optimizer.Guard
        self._epoch = 0

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        found = optimizer.optimizers_of(model)
        if comm.size() > 1 and any(map(optimizer.uses_local_sgd, found)):
            raise ValueError(
                "NanReport checks gradients that are averaged in each step. "
                "Received: ranks that make steps of their own (local SGD). Pass "
                'sync="every:1", or use keras.callbacks.TerminateOnNaN.'
            )
        self._guard = optimizer.Guard()
        step.install(model).instruments.watch(self._guard)
        for each in found:
            optimizer.watch(each)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.found = []
        comm.agree(
            {"NanReport": f"action={self.action!r}"},
            advice="Pass the same NanReport on every rank.",
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._guard.begin_epoch()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        # All ranks have the same hits, because all have the same average.
        if hits := self._guard.take():
            by_rank = comm.gather_or_raise(lambda: [self._examine(hit) for hit in hits])
            for hit, reports in zip(hits, zip(*by_rank, strict=True), strict=True):
                self._act(hit, [report for report in reports if report is not None])

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        for found in optimizer.optimizers_of(self.model):
            optimizer.unwatch(found)
        session_of(self.model).instruments.watch(None)
        step.uninstall(self.model)

    def _act(self, hit: optimizer.Hit, found: list[NotFinite]) -> None:
        if not found and hit.is_handled:  # only the loss scale was too large
            return
        found = found or [NotFinite(-1, self._epoch, hit.step)]
        is_reported = len(self.found) < _LIMIT
        self.found += found
        ends = {"stop": "training stops", "raise": "training ends here", "skip": ""}
        message = " ".join(map(str, found)) + " The update was left out on all ranks"
        message += f"; {ends[self.action]}." if ends[self.action] else "."
        if self.action == "raise":
            raise FloatingPointError(message)
        if comm.rank() == 0 and is_reported:
            note = " Later ones of this fit are not reported."
            is_last = len(self.found) >= _LIMIT
            warnings.warn(message + note * is_last, stacklevel=2)
        if self.action == "stop":
            # All ranks are here, so the stop is agreed without an exchange; the request
            # itself is for `StopTogether` at the end of the epoch.
            self.model.stop_training = True
            session_of(self.model).stop_request.grant(self.model, is_agreed=True)

    def _examine(self, hit: optimizer.Hit) -> NotFinite | None:
        """Return the report of this rank; `None` if only other ranks have one."""
        if hit.batch is None:
            return None
        origin = origin_of(self.model, hit.batch, hit.paths)
        if hit.is_handled and not (origin.is_output or origin.inputs):
            return None
        rows, batches = self._rows_and_batches(hit)
        indices = list(origin.indices)
        is_numbered = rows is not None and bool((rows[indices] >= 0).all())
        file, trouble = None, ""
        if len(self.found) < _LIMIT:
            file, trouble = self._save(hit, rows, origin)
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

    def _rows_and_batches(self, hit: optimizer.Hit) -> tuple[Any, Sequence[int]]:
        """Indices of the rows and of the batches that were read at a hit, if known."""
        feed = session_of(self.model).training_data.feed
        rows: Any = None
        batches: Sequence[int] = ()
        with contextlib.suppress(Exception):  # a report must not end the training
            if feed is not None and feed.rows_at is not None:
                rows = feed.rows_at(self._epoch, hit.step, hit.batch)
                read = next(iter(named_arrays(hit.batch).values()))
                rows = rows if len(rows) == len(read) else None
            if feed is not None and feed.batches_at is not None:
                batches = feed.batches_at(self._epoch, hit.step)
        return rows, batches

    def _save(
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
            atomic.replace(path, functools.partial(_write, arrays))
        except OSError as error:
            return None, f" Its batch could not be saved: {error}."
        return path, ""


def _write(arrays: dict[str, Any], path: str) -> None:
    np.savez(path, **arrays)  # no pickling: `_plain` has left no objects


def _plain(array: np.ndarray) -> np.ndarray:
    """Cast an array to a dtype that a `.npz` file holds without pickling."""
    if array.dtype.kind == "O":
        return array.astype(np.bytes_)
    is_known = array.dtype.kind in "biufcSU"
    return array if is_known else array.astype(np.float32)


def _counted(noun: str, numbers: Sequence[int]) -> str:
    """A noun and its numbers, as words; at most ten of them.

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
