"""State that is committed, restored and synchronized, by Horovod's names.

`run` synchronizes the state and calls the function. In the elastic mode of `horovodrun`
it calls it again when ranks were lost or hosts have changed. `keras-dist run` starts
all ranks anew instead, and they go on from the last commit.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm
from keras_dist.horovod import basics
from keras_dist.horovod.state import HostsUpdated, KerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

# In the text of an error that a collective raises when another rank has ended.
_LOST = ("Horovod", "Another rank has ended")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that trains: all ranks begin with the state of the first.

    In the elastic mode of `horovodrun`, the function is called again with the last
    commit when a rank was lost, and with the state of now when hosts have changed.
    Before that, the ranks connect anew, and functions are called that were registered
    by `state.register_reset_callbacks`. They are called, too, where `keras-dist run`
    has started the ranks anew: then the state is that of the newest commit.

    Args:
        func: A function whose first argument is a `KerasState`. No collective may be
            called before it but by `init`.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        basics.init()
        state.resume()
        is_synchronized = False
        with _listening(state):
            while True:
                try:
                    if not is_synchronized:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HostsUpdated as change:
                    is_synchronized = change.is_only_removal
                except (tf.errors.OpError, RuntimeError) as error:
                    if not comm.is_elastic() or not _is_lost(error):
                        raise
                    state.restore()
                    is_synchronized = False
                basics.shutdown()
                basics.init()
                state.on_reset()

    return wrapper


@contextlib.contextmanager
def _listening(state: Any) -> Iterator[None]:
    """Inside the block, the state is informed of hosts that come and go."""
    if not comm.is_elastic():
        yield
        return
    messages = _messages()
    messages.init()
    messages.register_listener(state)
    try:
        yield
    finally:
        messages.remove_listener(state)


@functools.cache
def _messages() -> Any:
    return comm.host_messages()


def _is_lost(error: Exception) -> bool:
    return any(text in str(error) for text in _LOST)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state every `batches_per_commit` batches and at the end of an epoch.

    Args:
        state: A `KerasState`.
        batches_per_commit: Batches between two commits.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets `state.batch` to the number of the last batch, and to 0 after an epoch.

    Args:
        state: A `KerasState` with `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Sets `state.epoch` to the number of epochs that are done, over all fits.

    Args:
        state: A `KerasState` with `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
