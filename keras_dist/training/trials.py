"""`microbatch="auto"`: a step is tried before it is made, for pieces that fit."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.optimizer.step_context import own_variable
from keras_dist.report.lines import say
from keras_dist.training.stray_variables import StrayVariable, assignments, handles_of

# Rows of a piece before any step has run out of memory.
_ALL_ROWS = 2**31


class Trials:
    """Finds how many rows a rank can compute at once, in the first epoch of a fit.

    A trial computes the gradients of a batch, without an exchange and an update, and
    takes back what that has changed. If one runs out of memory, all ranks halve the
    pieces and try again, before any rank has begun the step and waits for the others.
    What a step needs follows from shapes: a batch is tried if none before was as large.

    Attributes:
        rows: A variable: the most rows of a piece.
        is_trial: True while a trial is traced.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self.rows = own_variable(_ALL_ROWS, dtype=tf.int64)
        self.is_trial = False
        # The sizes of batches that fitted.
        self._fitting: list[list[int]] = []
        # What each traced trial changes, by the identity of its graph.
        self._changes: dict[int, list[StrayVariable]] = {}

    @property
    def has_pieces(self) -> bool:
        """True if a step did not fit as a whole."""
        return int(self.rows) < _ALL_ROWS

    def train_function(self, model: Any) -> Callable[[Any], Any]:
        """Return what Keras's loop calls in the place of the model's train function."""
        plain = model.train_function

        def compute(data: Any) -> Any:
            with self._trying():
                return model.train_step(data)

        function = {"reduce_retracing": True, "autograph": False}
        trial = tf.function(compute, **function)
        step = tf.function(model.train_step, **function)

        def run(iterator: Any) -> Any:
            logs = None
            for _ in range(model.steps_per_execution):
                try:
                    data = _without_optionals(next(iterator))
                except StopIteration:
                    # If there is none, Keras's own raises the error, and may count
                    # an update.
                    return plain(iterator) if logs is None else logs
                self._settle(trial, data)
                logs = step(data)
            return logs

        return run

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        self.is_trial = True
        try:
            yield
        finally:
            self.is_trial = False

    def _settle(self, trial: Any, data: Any) -> None:
        """Halve the pieces until the step on this batch fits on all ranks."""
        if not self._changes:
            self._trace(trial, data)  # builds the model, on all ranks
        sizes = _sizes(data)
        before = int(self.rows)
        failed: list[int] = []
        while True:
            is_new = not any(
                len(known) == len(sizes)
                and all(own <= n for own, n in zip(sizes, known, strict=True))
                for known in self._fitting
            )

            def attempt(is_new: bool = is_new) -> int | None:
                return self._rows_that_fail(trial, data) if is_new else None

            found = comm.gather_or_raise(attempt)
            if not any(found):
                break
            failed = [rank for rank, rows in enumerate(found) if rows]
            rows = min(int(self.rows), max(filter(None, found)))
            if rows == 1:
                comm.run_on_all(functools.partial(_raise_too_large, failed))
            self.rows.assign(-(-rows // 2))
        if is_new:
            self._fitting.append(sizes)
        if int(self.rows) < before and comm.rank() == 0:
            ranks = "rank " if len(failed) == 1 else "ranks "
            say(
                "keras-dist: a step ran out of memory on "
                f"{ranks}{', '.join(map(str, failed))}. All ranks compute at most "
                f"{int(self.rows):,} rows at once from now on (`microbatch`), and take "
                "the step again."
            )

    def _rows_that_fail(self, trial: Any, data: Any) -> int | None:
        """Try a step; return the rows of the batch if it runs out of memory."""
        changes = self._trace(trial, data)
        before = [variable.read() for variable in changes]
        try:
            trial(data)
        except tf.errors.ResourceExhaustedError:
            return max(_rows(leaf) for leaf in keras.tree.flatten(data))
        finally:
            for variable, value in zip(changes, before, strict=True):
                variable.assign(value)
        return None

    def _trace(self, trial: Any, data: Any) -> list[StrayVariable]:
        """Trace a trial for such a batch; return all variables that it changes."""
        graph = trial.get_concrete_function(data).graph
        if id(graph) not in self._changes:
            self._changes[id(graph)] = _changes(graph)
        return self._changes[id(graph)]


def _changes(graph: Any) -> list[StrayVariable]:
    handles = handles_of(graph)
    changed = {id(handle) for _, handle in assignments(graph, handles)}
    found = {}
    for handle in handles.values():
        kind = private.type_of_handle(handle)
        dtype = tf.resource if kind is None else tf.as_dtype(kind.dtype)
        # A generator of TensorFlow's changes its state by other operations.
        is_counter = dtype.is_integer and dtype != tf.resource
        if id(handle) in changed or is_counter:
            found[id(handle)] = StrayVariable(handle, dtype)
    return list(found.values())


def _raise_too_large(ranks: list[int]) -> None:
    names = ", ".join(map(str, ranks))
    raise MemoryError(
        "A train step does not fit in memory, even in pieces of one row. Received: "
        f'microbatch="auto", and ResourceExhaustedError on rank {names}. Take a '
        "smaller model, or a device with more memory."
    )


def _without_optionals(data: Any) -> Any:
    # As Keras does: `None` in a batch.
    return keras.tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


def _sizes(data: Any) -> list[int]:
    parts = tf.nest.flatten(data, expand_composites=True)
    return [size for part in parts if part is not None for size in part.shape]


def _rows(leaf: Any) -> int:
    return int(leaf.shape[0] or 0) if leaf is not None and leaf.shape.rank else 0
