"""Callbacks that `dist_fit` adds where they are needed."""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm, optimizer
from keras_dist.callbacks.throughput import waits_for_input
from keras_dist.callbacks.user_callbacks import first_rank_only
from keras_dist.data import adjusted
from keras_dist.report.lines import say
from keras_dist.training import step
from keras_dist.training.saving import atomic
from keras_dist.training.session import session_of

# File names of `keras.callbacks.BackupAndRestore`.
_WEIGHTS = "latest.weights.h5"
_METADATA = "training_metadata.json"


@first_rank_only
class BackupEpoch(keras.callbacks.Callback):
    """Makes `BackupAndRestore` restore the epoch that belongs to its weights.

    `BackupAndRestore` writes the weights and then a metadata file with the epoch. A
    process that is killed between the two, or while it writes the second, leaves an
    epoch that does not belong to the weights. The file of weights, which is replaced
    atomically, contains the epoch, too: the metadata file is rewritten from it before
    `BackupAndRestore` reads it.

    Position in the list: before the user's callbacks.

    Args:
        backups: The `BackupAndRestore` callbacks of the list.
    """

    def __init__(self, backups: Sequence[Any]) -> None:
        super().__init__()
        self.backups = backups
        self._epoch = 0

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        step.install(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        for backup in self.backups:
            folder = str(backup.backup_dir)
            if os.path.isfile(os.path.join(folder, _WEIGHTS)):
                _restore_metadata(folder)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        session_of(self.model).stamp.set(epoch, 0)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        session_of(self.model).stamp.set(self._epoch, batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).stamp.set(epoch + 1, 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).stamp.clear()


def _restore_metadata(folder: str) -> None:
    with contextlib.suppress(OSError):  # damaged weights: Keras raises the error
        stamp = atomic.stamp_of(os.path.join(folder, _WEIGHTS))
        path = os.path.join(folder, _METADATA)
        if stamp is not None and stamp != _metadata(path):
            atomic.replace(path, lambda part: _write(part, json.dumps(stamp)))


def _metadata(path: str) -> Any:
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):  # missing, or not written to its end
        return None


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


class EffectiveRate(keras.callbacks.Callback):
    """Puts the rate of the epoch's last update into `logs["effective_learning_rate"]`.

    The `learning_rate` that `TensorBoard` and trackers write is the rate for one
    process, because the scaling factor is applied only inside the update. With several
    optimizers in a `MultiOptimizer`, the name of each one is appended to the key, as in
    Keras.

    If no rank has a `TensorBoard` or a tracker, the logs are not changed. If a
    `TensorBoard` writes batches, their rates are written, too.

    Position in the list: before callbacks that read `logs`.

    Args:
        tensorboards: The `TensorBoard` callbacks of the list.
        has_tracker: Whether the list has a callback of an experiment tracker.
    """

    def __init__(
        self, tensorboards: Sequence[Any], *, has_tracker: bool = False
    ) -> None:
        super().__init__()
        self._is_asked = bool(tensorboards) or has_tracker
        self._is_wanted = False
        # `TensorBoard` writes on the first rank only.
        self._every = [
            tensorboard.update_freq
            for tensorboard in tensorboards
            if comm.rank() == 0 and tensorboard.update_freq != "epoch"
        ]
        self._batch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._is_wanted = any(comm.gather(self._is_asked))
        if self._is_wanted:
            session_of(self.model).rates.keep()
        self._batch = 0

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        # Not through the logs: older versions of Keras may use the logs of the last
        # batch as those of the epoch. `TensorBoard` has made its writer the default.
        self._batch += 1
        if any(self._batch % every == 0 for every in self._every):
            for name, rate in optimizer.effective_rates(self.model).items():
                tf.summary.scalar(f"batch_{name}", rate, step=self._batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_wanted and logs is not None:
            logs.update(session_of(self.model).rates.of_epoch)


class NextEpoch(keras.callbacks.Callback):
    """Tells the data and the train step which epoch begins, before its data is read."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        session_of(self.model).training_data.begin_epoch(epoch)


class EndOfTrials(keras.callbacks.Callback):
    """Ends the trials of `microbatch="auto"` after the first epoch of a fit."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        session = session_of(self.model)
        if session.microbatch.trials is not None:
            session.microbatch.end_trials()
            self.model.make_train_function(force=True)


# Steps, and seconds, from one comparison of the ranks' speeds to the next, at least.
_STEPS, _SECONDS = 16, 0.5

# XLA compiles each shape of a batch, and a GPU tunes for it: shares move in
# multiples of so many rows, and are compared so many times more seldom.
_COMPILED_ROWS, _COMPILED_SELDOM = 8, 8


# A step that takes longer than so many usual ones, such as one that is traced, counts
# as these.
_LONGEST = 20


class ComputingTimes:
    """Seconds that this rank has computed in each step since the last comparison.

    What is not averaging, nor waiting for other ranks or for input. A time is known
    when the next step of the epoch has its batch. Steps are counted by Keras's loop,
    equally on all ranks: where data ends without notice, a graph may begin one more.

    Args:
        stopwatch: Of the train step.
    """

    def __init__(self, stopwatch: optimizer.Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._begins: list[float] = []
        self._seconds: list[float] = []
        self._read = self._done = self._steps = 0

    def begin_epoch(self) -> None:
        """An epoch begins; `end_epoch` was called after the one before."""
        self._stopwatch.reset()
        self._begins.clear()
        self._read = self._done = 0

    def begin_execution(self) -> None:
        """One or several steps begin."""
        self._begins.append(time.time())

    def end_epoch(self) -> None:
        """Read the steps of the epoch."""
        self._read_steps()
        self._steps += self._done - self._read

    def steps(self, done: int) -> int:
        """Count the steps since the last comparison, after `done` of this epoch."""
        self._done = done
        return self._steps + done - self._read

    def take(self) -> float:
        """Return the mean of them, 0 if there is none; begin again after this step."""
        self._read_steps()
        self._read = self._done
        seconds, self._seconds, self._steps = self._seconds, [], 0
        if not seconds:
            return 0.0
        most = _LONGEST * float(np.median(seconds))
        return float(np.minimum(seconds, most).mean())

    def _read_steps(self) -> None:
        steps = slice(self._done - self._read)
        arrivals, exchanges = (
            times[steps] for times in self._stopwatch.read(self._read)
        )
        waits = waits_for_input(arrivals, self._begins)
        self._begins.clear()
        self._seconds += (np.diff(arrivals) - exchanges[:-1] - waits[1:]).tolist()


class MeasuredShares(keras.callbacks.Callback):
    """Gives each rank rows of the next steps by the speed at which it computes.

    Every few steps all ranks learn the seconds that each of them has computed in a
    step: what is not averaging, nor waiting for other ranks or for input, which no
    share changes. From these numbers each one finds the same shares (`adjusted`), and
    uses them from the next step on.

    The first rank logs a line after an epoch in which they changed.

    Attributes:
        changes: Epoch, step in it, and rows of each rank from there on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int, list[int]]] = []
        self._bounds: tuple[int, ...] = ()
        self._quantum = self._seldom = 1
        self._epoch = self._next = 0
        self._times: ComputingTimes

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        session = step.install(model)
        session.instruments.time_steps()
        stopwatch, shares = session.instruments.stopwatch, session.training_data.shares
        assert stopwatch is not None and shares is not None
        self._times = ComputingTimes(stopwatch)
        self._bounds, self.changes = shares.bounds, []
        is_compiled = model.jit_compile or tf.config.get_visible_devices("GPU")
        self._quantum = _COMPILED_ROWS if is_compiled else 1
        self._seldom = _COMPILED_SELDOM if is_compiled else 1
        self._next = _STEPS * self._seldom

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._say()
        self._epoch = epoch
        self._times.begin_epoch()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self._times.begin_execution()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        if self._times.steps(batch + 1) < self._next:
            return
        own = tf.constant(self._times.take(), tf.float64)
        seconds = comm.stack(own, purpose="shares").numpy()
        bounds = adjusted(self._bounds, seconds.tolist(), quantum=self._quantum)
        if bounds != self._bounds:
            self.changes.append((self._epoch, batch + 1, np.diff(bounds).tolist()))
            self._use(bounds)
        more = int(_SECONDS / max(float(seconds.max()), 1e-6))
        self._next = max(_STEPS, more) * self._seldom

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._times.end_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._say()

    def state_dict(self) -> dict[str, Any]:
        """Return the shares of now, for a checkpoint."""
        return {"bounds": list(self._bounds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the shares, if there are as many ranks and rows as before."""
        bounds = tuple(state["bounds"])
        if len(bounds) == len(self._bounds) and bounds[-1] == self._bounds[-1]:
            self._use(bounds)

    def _use(self, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        session_of(self.model).training_data.divide(bounds)

    def _say(self) -> None:
        # Called after the end of an epoch, when the progress bar has ended its line.
        count = sum(epoch == self._epoch for epoch, _, _ in self.changes)
        if count and comm.rank() == 0 and self.params.get("verbose"):
            parts = np.diff(self._bounds) / self._bounds[-1]
            shares = " + ".join(f"{part:.0%}" for part in parts)
            times = "once" if count == 1 else f"{count} times"
            say(
                f"epoch {self._epoch + 1}: shares of a batch moved {times}, to {shares}"
            )
