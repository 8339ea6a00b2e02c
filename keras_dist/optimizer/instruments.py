"""What a train step carries: a stop request, a stopwatch, a guard against NaN."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist.optimizer.nested import nested_optimizers
from keras_dist.optimizer.step_context import own_variable


class StopRequest:
    """The stop request of one rank, until all ranks act on it after the same step.

    If one rank left Keras's loop first, the others would wait for it in the next
    allreduce. So a request goes through three states:

    1. *requested*: this rank has called `ask`, or `ask_to_save` for a checkpoint;
    2. *agreed*: the sum of all requests came with the gradients of an update
       (`collect`), on all ranks in the same step;
    3. *done*: the ranks act on it (`grant`, `clear`).
    """

    def __init__(self) -> None:
        # On the CPU, since it is read after each batch. Keras does not save it.
        with tf.init_scope(), tf.device("CPU:0"):
            self._own = own_variable(0.0)
            self._agreed = own_variable(0.0)
        self._is_asked = False
        self._is_collective = False

    @property
    def is_asked(self) -> bool:
        """True if this rank has requested to stop."""
        return self._is_asked

    @property
    def is_collective(self) -> bool:
        """True if this rank stops only when all ranks have agreed."""
        return self._is_collective

    def make_collective(self, is_collective: bool) -> None:
        """Set whether all ranks have to agree before a request ends the training."""
        self._is_collective = is_collective

    def ask(self, is_asked: bool) -> None:
        """Request to stop, or withdraw the request; sent with the next update."""
        self._is_asked = is_asked
        with tf.init_scope():
            self._own.assign(float(is_asked))

    def ask_to_save(self) -> None:
        """Make all ranks gather their save requests after the next update."""
        self._own.assign(1.0)

    def as_tensor(self, dtype: Any) -> Any:
        """1 if this rank has a request, else 0: a scalar tensor, to be summed."""
        return tf.cast(self._own.read_value(), dtype)

    def collect(self, total: Any) -> None:
        """Store the sum of all ranks' requests, in an update that all ranks make."""
        self._agreed.assign_add(tf.cast(total, self._agreed.dtype))

    def is_agreed(self) -> bool:
        """Tell whether a request of some rank has reached all ranks; equal on all."""
        return tf.executing_eagerly() and float(self._agreed.numpy()) > 0

    def grant(self, model: Any, *, is_agreed: bool) -> None:
        """Set `stop_training` of `model` for Keras's loop; equal on all ranks.

        This rank's own request stays until it is withdrawn.
        """
        model.__dict__["stop_training"] = is_agreed
        self._agreed.assign(0.0)

    def clear(self) -> None:
        """Drop requests that were acted on; all ranks call this after the same step."""
        self._own.assign(0.0)
        self._agreed.assign(0.0)


_CAPACITY = 2**18  # steps of an epoch that are recorded; later ones are not


class Stopwatch:
    """Records when each step's data was ready, and how long its exchange took.

    `has_traced` is true if a step was traced in this epoch.
    """

    def __init__(self) -> None:
        self.has_traced = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._steps, self._arrivals, self._seconds = (
                own_variable(tf.zeros(shape, dtype))
                for shape, dtype in (
                    ([], tf.int64),
                    ([_CAPACITY], tf.float64),
                    ([_CAPACITY], tf.float64),
                )
            )

    def reset(self) -> None:
        """Begin an epoch."""
        self._steps.assign(0)
        self.has_traced = False

    def begin_step(self, data: Any) -> Any:
        """Record that a step has its data; return the data for what comes after."""
        self.has_traced |= not tf.executing_eagerly()
        leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
        index = tf.minimum(self._steps.read_value(), _CAPACITY - 1)
        now = _time_after(leaves)
        self._arrivals.scatter_update(tf.IndexedSlices(now, index))
        self._seconds.scatter_update(tf.IndexedSlices(tf.zeros([], now.dtype), index))
        self._steps.assign_add(1)
        with tf.control_dependencies([now]):
            # Otherwise TensorFlow might read the clock when the step is nearly over.
            return tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf), data
            )

    def begin_exchange(self, gradients: Sequence[Any]) -> Any:
        """Return the time at which this rank's gradients are ready."""
        return _time_after(gradients)

    def end_exchange(self, begin: Any, results: Sequence[Any]) -> None:
        """Add the seconds from `begin` until the averaged gradients are ready."""
        seconds = _time_after(results) - begin
        index = tf.minimum(self._steps.read_value(), _CAPACITY) - 1
        self._seconds.scatter_add(tf.IndexedSlices(seconds, index))

    def read(self, begin: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """For each step, the time at which its data was ready, and seconds of exchange.

        The times are those of `time.time()`. Steps before `begin` are left out.
        """
        steps = slice(begin, min(int(self._steps.numpy()), _CAPACITY))
        return self._arrivals[steps].numpy(), self._seconds[steps].numpy()


def _time_after(tensors: Sequence[Any]) -> Any:
    tensors = [tensor for tensor in tensors if tensor is not None]
    if tf.executing_eagerly():
        return tf.timestamp()
    with tf.control_dependencies(
        [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
    ):
        return tf.timestamp()


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
