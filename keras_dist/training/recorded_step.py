"""A train step in three parts: gradients, the exchange with other ranks, the update."""

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any

import keras
import tensorflow as tf

from keras_dist.optimizer import (
    Recorded,
    apply_recorded,
    guarded_update,
    reduce_gradients,
    step_context,
    variables_of,
    with_shape,
)
from keras_dist.training.pieces import Pieces, PieceTrace


class RecordedStep:
    """Computes gradients, averages them, and applies them, one after the other.

    The model's own train step computes everything in one. Here it runs in a function of
    its own, where `apply` only records the gradients. They are averaged outside, and
    applied then. So XLA, which cannot compile a collective, compiles what is before it
    and what is after it; and a batch may be computed in pieces before it.

    Args:
        model: The model.
        own_step: Its own `train_step`; its variables must exist.
        is_compiled: Whether XLA compiles the first and the last part.
        microbatch: The most rows that are computed at once: a number, or a variable;
            `None`: all.
        is_of_rank: Whether losses are those of this rank's rows alone.
        sums: See `Pieces`.
    """

    def __init__(
        self,
        model: Any,
        own_step: Callable[[Any], Any],
        *,
        is_compiled: bool,
        microbatch: Any,
        is_of_rank: bool,
        sums: Any,
    ) -> None:
        self._own_step = own_step
        self._calls: list[Recorded] = []
        function = functools.partial(
            tf.function, jit_compile=True if is_compiled else None, autograph=False
        )
        self._pieces = None
        self._compute_gradients = function(self._record)
        if microbatch is not None:
            self._pieces = Pieces(
                model,
                own_step,
                microbatch=microbatch,
                is_of_rank=is_of_rank,
                sums=sums,
                function=function,
            )
            self._compute_gradients = self._pieces.compute_piece
        self._apply_gradients = self._apply
        if is_compiled:
            self._apply_gradients = function(self._apply)

    def why_not(self, data: Any) -> str | None:
        """Explain why XLA cannot compile the step for such batches; `None` if it can.

        The step is not run. It is traced, and translated for XLA; an unknown number of
        rows is taken as two.
        """
        # This is called while a graph is traced. Another thread is outside of that
        # graph; so is `tf.init_scope`, but there no tape records a gradient.
        specs = self._specs(data)
        context = contextvars.copy_context()
        with futures.ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(context.run, self._try, specs).result()

    def _specs(self, data: Any) -> tuple[Any, Any]:
        if self._pieces is not None:
            return self._pieces.specs(data)
        return keras.tree.map_structure(_spec, (data, _counts()))

    def _try(self, specs: tuple[Any, Any]) -> str | None:
        try:
            self._compute_gradients.get_concrete_function(*specs)
            if self._pieces is None and len(self._calls) != 1:
                return f"its train step makes {len(self._calls)} updates, not one"
            batch = keras.tree.map_structure(_two_rows, specs)
            self._compute_gradients.experimental_get_compiler_ir(*batch)(stage="hlo")
        except Exception as error:  # after any error, the step runs without XLA
            return f"XLA cannot compile this model ({_first_line(error)})"
        return None

    def trace_piece(self, data: Any) -> PieceTrace:
        """Trace the step for a piece of a batch, without running it.

        Raises:
            ValueError: If the step cannot be computed in pieces.
        """
        assert self._pieces is not None  # made with `microbatch`
        return self._pieces.trace(self._pieces.specs(data))

    def run(
        self, data: Any, trace: PieceTrace | None = None, *, is_trial: bool = False
    ) -> Any:
        """Run one train step, and return the logs of the model's own step.

        Args:
            data: The batch.
            trace: What `trace_piece` returned for such a batch, if it is in pieces.
            is_trial: Whether to return logs and gradients instead, without an exchange
                and an update.
        """
        if self._pieces is None or trace is None:
            logs, gradients = self._compute_gradients(data, _counts())
            [call], [own] = self._calls, gradients
        else:
            logs, call, own = self._pieces.compute(data, trace, is_trial=is_trial)
            self._calls = [call]
            if is_trial:
                return logs, own
        variables = variables_of(call.optimizer, call.variables)
        own = [with_shape(*pair) for pair in zip(own, variables, strict=True)]
        averaged = reduce_gradients(call.optimizer, own, call.variables)
        make = functools.partial(self._apply_gradients, [averaged])
        guarded_update(call.optimizer, own, averaged, call.variables, make)
        return logs

    def _record(self, data: Any, counts: tuple[Any, Any]) -> Any:
        calls: list[Recorded] = []
        rows, rows_of_all = counts
        context = dataclasses.replace(
            step_context.current(),
            recorded=calls,
            rows=rows,
            rows_of_all=rows_of_all,
        )
        with step_context.entered(context):
            logs = self._own_step(data)
        self._calls[:] = calls
        return logs, [
            [_without_shape(gradient) for gradient in call.gradients] for call in calls
        ]

    def _apply(self, averaged: Any) -> None:
        for call, gradients in zip(self._calls, averaged, strict=True):
            apply_recorded(call, gradients)


def _without_shape(gradient: Any) -> Any:
    """A gradient as XLA returns it; the shape of slices is that of their variable."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values, gradient.indices)
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _counts() -> tuple[Any, Any]:
    """Rows of this rank and of all; what XLA compiles must not read them elsewhere."""
    context = step_context.current()
    return context.rows, context.rows_of_all


def _spec(leaf: Any) -> Any:
    is_tensor = tf.is_tensor(leaf)
    return tf.TensorSpec(leaf.shape, leaf.dtype) if is_tensor else leaf


def _two_rows(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec):
        return spec
    # A tensor, since TensorFlow accepts no structure of specs here.
    return tf.zeros([2 if n is None else n for n in spec.shape], spec.dtype)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
