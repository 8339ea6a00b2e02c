"""Leave an update out, on all ranks, if a rank's gradients are not finite."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist.optimizer.nested import nested_optimizers
from keras_dist.optimizer.step_context import own_variable


@dataclass(frozen=True)
class Hit:
    """An update with gradients that are not finite on some rank.

    Args:
        step: The step of the epoch.
        is_handled: Whether the optimizer itself leaves the update out, as a
            `LossScaleOptimizer` does.
        paths: Variables whose gradient on this rank is not finite, in their order.
        batch: This rank's batch; `None` if its gradients are finite.
    """

    step: int
    is_handled: bool
    paths: tuple[str, ...]
    batch: Any = None


class Guard:
    """Checks averaged gradients before they are applied.

    An average is finite only if every rank's gradient is, and it is equal on all ranks.
    So all ranks see a hit in the same step without another collective. Only after a hit
    does a rank check its own gradients.
    """

    def __init__(self) -> None:
        self.hits: list[Hit] = []
        self._batch: list[Any] = []
        with tf.init_scope(), tf.device("CPU:0"):
            self._step = own_variable(-1, dtype=tf.int64)
            self._is_left_out = own_variable(False)

    def begin_epoch(self) -> None:
        """Count the steps of the epoch from 0 again."""
        self._step.assign(-1)

    def take(self) -> list[Hit]:
        """Return the hits since the last call."""
        hits, self.hits = self.hits, []
        return hits

    def begin_step(self, model: Any, data: Any) -> Callable[[], None]:
        """Begin a train step on `data`.

        Returns:
            A function to call when the step is over. If the update was left out, it
            restores metrics and statistics, as if there had been no such batch.
        """
        self._step.assign_add(1)
        self._is_left_out.assign(False)
        saved = list(model.non_trainable_weights)
        saved += [v for metric in model.metrics for v in metric.variables]
        before = [tf.convert_to_tensor(variable.value) for variable in saved]
        self._batch[:] = [data]

        def restore() -> Any:
            for variable, value in zip(saved, before, strict=True):
                variable.assign(value)
            return tf.constant(0)

        def end_step() -> None:
            is_left_out = self._is_left_out.read_value()
            tf.cond(is_left_out, restore, lambda: tf.constant(0))

        return end_step

    def update(
        self,
        optimizer: Any,
        own: Sequence[Any],
        averaged: Sequence[Any],
        variables: Sequence[Any],
        make: Callable[[], Any],
    ) -> None:
        """Make an update, or record a hit if gradients are not finite."""
        local = optimizer._averaging.options.local_ids()
        shared = [
            _dense(gradient)
            for gradient, variable in zip(averaged, variables, strict=True)
            if gradient is not None and id(variable) not in local
        ]
        # Under a loss scale, gradients that are not finite are normal now and then.
        is_handled = len(nested_optimizers(optimizer)) > 1
        paths = [
            getattr(variable, "path", variable.name)
            for variable, gradient in zip(variables, own, strict=True)
            if gradient is not None
        ]
        tensors = [_dense(gradient) for gradient in own if gradient is not None]
        keep = functools.partial(self._keep, is_handled, paths, self._batch[0])

        def leave_out() -> Any:
            batch = _tensors_of(self._batch[0])
            tf.py_function(keep, [self._step.read_value(), *tensors, *batch], [])
            if not is_handled:
                self._is_left_out.assign(True)
            return tf.constant(0)

        def apply_update() -> Any:
            make()
            return tf.constant(0)

        is_bad = _is_bad(shared)
        if is_handled:
            tf.cond(is_bad, leave_out, lambda: tf.constant(0))
            make()
        else:
            tf.cond(is_bad, leave_out, apply_update)

    def _keep(
        self, is_handled: bool, paths: Sequence[str], data: Any, step: Any, *both: Any
    ) -> None:
        gradients, batch = both[: len(paths)], both[len(paths) :]
        own = tuple(
            path
            for path, gradient in zip(paths, gradients, strict=True)
            if not bool(_all_finite(gradient))
        )
        restored = _packed(data, batch) if own else None
        self.hits.append(Hit(int(step), is_handled, own, restored))


def _is_bad(tensors: Sequence[Any]) -> Any:
    """Tell whether some tensor has an element that is not finite."""
    tensors = [tensor for tensor in tensors if tensor.dtype.is_floating]
    if not tensors:
        return tf.constant(False)
    # One pass over the elements: their sum. A sum of finite numbers may overflow, so
    # the elements are checked only if the sum is not finite.
    sums = [tf.cast(tf.reduce_sum(tensor), tf.float32) for tensor in tensors]
    return tf.cond(
        tf.math.is_finite(tf.add_n(sums)),
        lambda: tf.constant(False),
        lambda: tf.logical_not(tf.reduce_all([_all_finite(t) for t in tensors])),
    )


def _all_finite(tensor: Any) -> Any:
    if not tensor.dtype.is_floating:
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(tensor))


def _dense(gradient: Any) -> Any:
    """Return the elements of a gradient; of `tf.IndexedSlices`, its values."""
    is_rows = isinstance(gradient, tf.IndexedSlices)
    return gradient.values if is_rows else tf.convert_to_tensor(gradient)


def _tensors_of(data: Any) -> list[Any]:
    """Tensors of a batch; for ragged and sparse tensors, their components."""
    flat = tf.nest.flatten(data, expand_composites=True)
    return [leaf for leaf in flat if leaf is not None]


def _packed(data: Any, tensors: Sequence[Any]) -> Any:
    """Return the structure of a batch, with `tensors` in it."""
    rest = iter(tensors)
    flat = tf.nest.flatten(data, expand_composites=True)
    filled = [None if leaf is None else next(rest) for leaf in flat]
    return tf.nest.pack_sequence_as(data, filled, expand_composites=True)
