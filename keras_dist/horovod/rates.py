"""Learning rates that change with the epoch, by Horovod's formulas."""

import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras

from keras_dist import comm
from keras_dist.horovod.averaging import is_next_an_update
from keras_dist.optimizer import leaves


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` × `multiplier`, and logs it as `lr`.

    Args:
        initial_lr: The rate that is multiplied.
        multiplier: A function of the epoch; or a number m, for
            m ** (epoch − `start_epoch`).
        start_epoch: The first epoch in which the rate is set.
        end_epoch: The epoch before which that ends, `None` for never.
        staircase: Whether the rate is set at the first batch of an epoch, by its whole
            number; otherwise at each batch, by epoch + batch / steps.
        momentum_correction: Whether the momentum of SGD and RMSprop is scaled with the
            rate (Goyal et al., 2017, https://arxiv.org/abs/1706.02677).
        steps_per_epoch: Steps of an epoch, if Keras does not know them.

    Without `initial_lr`, as before Horovod 0.21, it is the optimizer's rate when the
    training begins, and a number as `multiplier` is a plain factor; there is a warning.

    Raises:
        ValueError: If the steps of an epoch are needed and not known.
    """

    def __init__(
        self,
        initial_lr: Any = None,
        multiplier: Any = None,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if multiplier is None:
            initial_lr, multiplier = None, initial_lr
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        is_old = initial_lr is None
        if is_old:
            _warn_of_old_signature(type(self).__name__)
        self.multiplier = _function(multiplier, start_epoch, is_plain=is_old)

    def on_train_begin(self, logs: Any = None) -> None:
        if self.initial_lr is None:
            self.initial_lr = _rate(self.model.optimizer)
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = _steps(self)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        is_over = self.end_epoch is not None and epoch >= self.end_epoch
        if epoch < self.start_epoch or is_over:
            return
        if not self.staircase:
            self._set_rate(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._set_rate(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = _rate(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and old and is_next_an_update(optimizer):
            _scale_momentum(optimizer, new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` / size to `initial_lr`, gradually.

    The rate is initial_lr / size · (1 + (size − 1) · (epoch + (batch + 1) / steps) /
    warmup_epochs) in the first `warmup_epochs` epochs (Goyal et al., 2017,
    https://arxiv.org/abs/1706.02677). Afterwards it is not set again.

    Args:
        initial_lr: The rate after the warm-up; without it, as before Horovod 0.21, the
            optimizer's rate when the training begins, and there is a warning.
        warmup_epochs: Epochs of the warm-up.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: Steps of an epoch, if Keras does not know them.
        verbose: 1 for a line on the first rank when it is over.

    Raises:
        ValueError: If the steps of an epoch are not known.
    """

    def __init__(
        self,
        initial_lr: Any = None,
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

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        is_last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if is_last and self.verbose and comm.rank() == 0:
            rate = _rate(self.model.optimizer)
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "
                f"{rate:g}."
            )


def _function(
    multiplier: Any, start_epoch: int, *, is_plain: bool
) -> Callable[[float], float]:
    if callable(multiplier):
        return multiplier
    if not isinstance(multiplier, (int, float)):
        raise ValueError(
            "`multiplier` must be a function of the epoch, or a number. "
            f"Received: multiplier={multiplier!r}"
        )
    if is_plain:
        return lambda epoch: multiplier
    return lambda epoch: multiplier ** (epoch - start_epoch)


def _warn_of_old_signature(name: str) -> None:
    warnings.warn(
        f"{name} without `initial_lr`: as before Horovod 0.21, it is the optimizer's "
        "learning rate when the training begins, and a number as `multiplier` is a "
        "plain factor. Pass `initial_lr`.",
        stacklevel=_frames_of_this_file() + 1,
    )


def _frames_of_this_file() -> int:
    """Return the number of callers in a row that are in this file: two `__init__`s."""
    callers = (frame.filename for frame in inspect.stack(context=0)[1:])
    return sum(1 for _ in itertools.takewhile(__file__.__eq__, callers))


def _steps(callback: Any) -> int:
    steps = callback.params.get("steps")
    if not steps:
        raise ValueError(
            "The number of steps of an epoch is not known, so the rate of a batch is "
            f"not known, either. Received: {type(callback).__name__} with "
            "steps_per_epoch=None. Pass `steps_per_epoch` to it or to fit."
        )
    return int(steps)


def _rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _scale_momentum(optimizer: Any, factor: float) -> None:
    """Scale the momentum of the next update, by scaling what it is multiplied by.

    The momentum itself is a constant of the compiled step.
    """
    if factor == 1.0:
        return
    for leaf in leaves(optimizer):
        if not getattr(leaf, "momentum", 0):
            continue
        names = ("momentums", "_momentums")  # of SGD, of RMSprop
        slots = next((vars(leaf)[name] for name in names if name in vars(leaf)), ())
        for slot in slots:
            if slot is not None:
                slot.assign(slot.value * factor)
