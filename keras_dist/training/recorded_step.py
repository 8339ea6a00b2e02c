"""A train step in three parts: gradients, the exchange with other ranks, the update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_dist import private
from keras_dist.errors import summarize
from keras_dist.optimizer import step_context
from keras_dist.optimizer.attach import Recorded, apply_recorded
from keras_dist.optimizer.reduce import reduce_gradients


class RecordedStep:
    """Computes gradients, averages them, and applies them, one after the other.

    The model's own train step computes everything in one. Here it runs in a function of
    its own, where `apply` only records the gradients. They are averaged outside, and
    applied then. So XLA, which cannot compile a collective, compiles what is before it
    and what is after it. All variables must exist.
    """

    def __init__(self, own_step: Callable[[Any], Any]) -> None:
        self._own_step = own_step
        self._calls: list[Recorded] = []
        compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
        self._compute_gradients = compiled(self._record)
        self._apply_gradients = compiled(self._apply)

    def why_not(self, data: Any) -> str | None:
        """Explain why XLA cannot compile the step for such batches; `None` if it can.

        The step is not run. It is traced, and translated for XLA; an unknown number of
        rows is taken as two.
        """
        # This is called while a graph is traced. Another thread is outside of that
        # graph; so is `tf.init_scope`, but there no tape records a gradient.
        specs = keras.tree.map_structure(_spec, (data, _counts()))
        return private.run_in_thread(lambda: self._try(specs))

    def _try(self, specs: Any) -> str | None:
        try:
            self._compute_gradients.get_concrete_function(*specs)
            if len(self._calls) != 1:
                return f"its train step makes {len(self._calls)} updates, not one"
            if any(map(tf.is_tensor, self._calls[0].more.values())):
                return "its update needs more than gradients"
            batch = keras.tree.map_structure(_two_rows, specs)
            self._compute_gradients.experimental_get_compiler_ir(*batch)(stage="hlo")
        except Exception as error:  # after any error, the step runs without XLA
            return f"XLA cannot compile this model ({summarize(error)})"
        return None

    def run(self, data: Any) -> Any:
        """Run one train step, and return the logs of the model's own step."""
        logs, gradients = self._compute_gradients(data, _counts())
        [call], [own] = self._calls, gradients
        averaged = reduce_gradients(
            call.optimizer, own, call.variables, is_sum=call.is_sum
        )
        self._apply_gradients(averaged)
        return logs

    def _record(self, data: Any, counts: dict[str, Any]) -> Any:
        calls: list[Recorded] = []
        context = dataclasses.replace(
            step_context.current(), recorded=calls, is_compiled=True, **counts
        )
        with step_context.enter(context):
            logs = self._own_step(data)
        self._calls[:] = calls
        return logs, [
            [_without_shape(gradient) for gradient in call.gradients] for call in calls
        ]

    def _apply(self, averaged: Any) -> None:
        apply_recorded(self._calls[0], averaged)


def _without_shape(gradient: Any) -> Any:
    """A gradient as XLA returns it; the shape of slices is that of their variable."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values, gradient.indices)
    return gradient


def _counts() -> dict[str, Any]:
    """What a step knows of its rows; what XLA compiles must not read it elsewhere."""
    context = step_context.current()
    names = ("rows", "rows_of_all", "length", "begin")
    return {name: getattr(context, name) for name in names}


def _spec(leaf: Any) -> Any:
    is_tensor = tf.is_tensor(leaf)
    return tf.TensorSpec(leaf.shape, leaf.dtype) if is_tensor else leaf


def _two_rows(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec):
        return spec
    # A tensor, since TensorFlow accepts no structure of specs here.
    return tf.zeros([2 if n is None else n for n in spec.shape], spec.dtype)
