"""Horovod's callbacks for Keras, by their names.

They do not open a fit of this package (`open_fit`): in it gradients are weighted by
rows, random numbers are those of one process, and adding up batches as Horovod does is
an error. A script of Horovod gets what Horovod's own gave: ranks that count the same.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.horovod.collectives import broadcast_variables
from keras_dist.horovod.optimizer import (
    check_all_ranks,
    is_next_an_update,
    move_to_outermost,
)
from keras_dist.optimizer.nested import build_optimizer, leaves, state_of
from keras_dist.training import build


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts weights and optimizer state from one rank before the first step.

    A callback object broadcasts once. A model that is not built is built from its first
    batch. Each rank keeps its own states of random generators.

    Args:
        root_rank: The rank whose state is broadcast.
        device: Ignored; accepted for compatibility.
        local_variables: Must be `None`: all variables are broadcast.

    Raises:
        ValueError: If `local_variables` is not `None`; or, on all ranks and before
            anything is broadcast, if variables differ in number, shape or dtype.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> start = BroadcastGlobalVariablesCallback(0)
    >>> _ = model.fit(np.ones((8, 2)), np.ones(8), verbose=0, callbacks=[start])
    >>> start.broadcast_done
    True
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any = None
    ) -> None:
        if local_variables is not None:
            raise ValueError(
                "All ranks train one model, so no variable can stay each rank's own. "
                f"Received: local_variables={local_variables!r}. Leave it out."
            )
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model = self.model
        if not self.broadcast_done and not _is_built(model):
            object.__setattr__(model, "_before_first_step", self.broadcast)
            mixin.add(model, BuiltByFirstStep)

    def on_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.broadcast_done and _is_built(self.model):
            self.broadcast()

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.broadcast()  # if there was no other moment
        mixin.remove(self.model, BuiltByFirstStep)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        mixin.remove(self.model, BuiltByFirstStep)

    def broadcast(self) -> None:
        """Broadcast now, unless it was done."""
        if self.broadcast_done:
            return
        self.broadcast_done = True
        optimizer = getattr(self.model, "optimizer", None)
        found = list(self.model.weights)
        if optimizer is not None:
            move_to_outermost(optimizer)
            build_optimizer(optimizer, self.model.trainable_variables)
            found += state_of(optimizer)
        broadcast_variables({id(v): v for v in found}.values(), self.root_rank)


class BuiltByFirstStep:
    """Mixin for a model that is not built: its first batch builds it, then a hook."""

    _before_first_step: Any = None

    def train_step(self: Any, data: Any) -> Any:
        own_step = super().train_step  # type: ignore[misc]
        hook, is_eager = self._before_first_step, tf.executing_eagerly()
        if hook is not None:
            object.__setattr__(self, "_before_first_step", None)
            build.build(self, own_step, data, is_eager=is_eager)
            with tf.init_scope():
                hook()
        return own_step(data)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the logs over the ranks at the end of an epoch.

    Each rank has the same weight. Position in the list: before callbacks that read
    `logs`.

    Args:
        device: Ignored; accepted for compatibility.
        process_set: Must be all ranks, or `None`.

    Raises:
        ValueError: If `process_set` is not all ranks; or, on all ranks, if the names in
            their logs differ.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> means = MetricAverageCallback()
    >>> done = model.fit(np.ones((8, 2)), np.ones(8), verbose=0, callbacks=[means])
    >>> list(done.history)
    ['loss']
    """

    def __init__(self, device: str = "", process_set: Any = None) -> None:
        check_all_ranks(process_set)
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        advice = (
            "Give all ranks the same metrics, validation data and callbacks that log, "
            "or put such a callback after MetricAverageCallback."
        )
        comm.agree({"the names in the logs": sorted(logs)}, advice=advice)
        values = comm.gather({k: np.asarray(v, "float64") for k, v in logs.items()})
        for name in logs:
            mean = sum(v[name] for v in values) / len(values)
            logs[name] = mean if np.ndim(mean) else float(mean)


def _is_built(model: Any) -> bool:
    layers = private.layers_of(model)
    return model.built and all(layer.built or layer.weights for layer in layers)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` × `multiplier`, and logs it as `lr`.

    Args:
        initial_lr: The rate that is multiplied.
        multiplier: A function of the epoch; or a number m, for
            m ** (epoch − `start_epoch`).
        start_epoch: The first epoch in which the rate is set.
        end_epoch: The epoch from which the rate is no longer set; `None` for never.
        staircase: Whether the rate is set at the first batch of each epoch, from the
            epoch number; otherwise at each batch, from epoch + batch / steps.
        momentum_correction: Whether the momentum of SGD and RMSprop is scaled with the
            rate (Goyal et al., 2017, https://arxiv.org/abs/1706.02677).
        steps_per_epoch: Steps of an epoch, if Keras does not know them.

    Raises:
        ValueError: If the number of steps of an epoch is needed but not known, or if
            `multiplier` is neither a function nor a number.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> halve = LearningRateScheduleCallback(0.5, multiplier=0.5)
    >>> x, y = np.ones((8, 2)), np.ones(8)
    >>> done = model.fit(x, y, epochs=3, verbose=0, callbacks=[halve])
    >>> done.history["lr"]
    [0.5, 0.25, 0.125]
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if not isinstance(multiplier, (int, float)) and not callable(multiplier):
            raise ValueError(
                "`multiplier` must be a function of the epoch, or a number. "
                f"Received: multiplier={multiplier!r}"
            )
        self.multiplier = multiplier

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                "The number of steps of an epoch is not known, so the rate of a batch "
                f"is not known, either. Received: {type(self).__name__} with "
                "steps_per_epoch=None. Pass `steps_per_epoch` to it or to fit."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        epoch, end = self.current_epoch, self.end_epoch
        if epoch < self.start_epoch or (end is not None and epoch >= end):
            return
        if not self.staircase:
            self._set_rate(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._set_rate(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, m = _rate(optimizer), self.multiplier
        factor = m(epoch) if callable(m) else m ** (epoch - self.start_epoch)
        new = self.initial_lr * factor
        optimizer.learning_rate = new
        if not (self.momentum_correction and old and is_next_an_update(optimizer)):
            return
        # The momentum itself is a constant of the compiled step: what it is multiplied
        # by is scaled, for the next update.
        for leaf in leaves(optimizer):
            slots = private.momentums_of(leaf) if getattr(leaf, "momentum", 0) else []
            for slot in slots:
                if slot is not None:
                    slot.assign(slot.value * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` / size to `initial_lr`, gradually.

    The rate is initial_lr / size · (1 + (size − 1) · (epoch + (batch + 1) / steps) /
    warmup_epochs) in the first `warmup_epochs` epochs (Goyal et al., 2017,
    https://arxiv.org/abs/1706.02677). Afterwards, the rate is not changed.

    Args:
        initial_lr: The rate after the warm-up.
        warmup_epochs: Epochs of the warm-up.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: Steps of an epoch, if Keras does not know them.
        verbose: 1 to print a line on the first rank when the warm-up is over.

    Raises:
        ValueError: If the number of steps of an epoch is not known.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> warmup = LearningRateWarmupCallback(0.5, warmup_epochs=1)
    >>> done = model.fit(np.ones((8, 2)), np.ones(8), verbose=0, callbacks=[warmup])
    >>> done.history["lr"]  # on one rank
    [0.5]
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = comm.size()
            # A batch later: the last one of an epoch has a round number.
            epoch += 1 / (self.steps_per_epoch or 1)
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        is_last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if is_last and self.verbose and comm.rank() == 0:
            rate, warmup = _rate(self.model.optimizer), "gradual learning rate warmup"
            print(f"\nEpoch {epoch + 1}: finished {warmup} to {rate:g}.")


def _rate(optimizer: Any) -> float:
    return float(comm.to_array(optimizer.learning_rate))
