"""Horovod's elastic mode: `run`, `KerasState`, callbacks that commit."""

import contextlib
import functools
import itertools
import os
import pickle
import queue
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.horovod import basics
from keras_dist.horovod.collectives import broadcast_object, broadcast_variables
from keras_dist.launch import processes
from keras_dist.launch.ranks import RESTART
from keras_dist.report import write_whole

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

# In the text of an error that a collective raises when another rank has ended.
_LOST = ("Horovod", "Another rank has ended")

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function that trains: all ranks begin with the state of the first.

    In the elastic mode of `horovodrun`, the function is called again with the last
    commit when a rank was lost, and with the state of now when hosts have changed.
    Before that, the ranks connect again, and functions are called that were registered
    by `state.register_reset_callbacks`. They are called, too, where `keras-dist run`
    has started the ranks again: then the state is that of the newest commit.

    Args:
        func: A function whose first argument is a `KerasState`. No collective may be
            called before it but by `init`.

    Returns:
        A function with the same arguments.

    Example:

    >>> @run
    ... def train(state):
    ...     for state.epoch in range(state.epoch, 3):
    ...         state.commit()  # after training for an epoch
    ...     return state.epoch
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> train(KerasState(model, epoch=0))
    2
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Result:
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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1


_numbers = itertools.count()

# Horovod's flag of a change of hosts that only takes some away.
_REMOVED = 1


class HostsUpdated(Exception):  # noqa: N818 - it is no error
    """Hosts have come or gone, and the ranks have to connect again.

    Args:
        is_only_removal: Whether no rank is new, so that all have the same state.
    """

    def __init__(self, is_only_removal: bool) -> None:
        super().__init__("hosts have come or gone")
        self.is_only_removal = is_only_removal


class KerasState:
    """A model, its optimizer and further values, of which there is a last commit.

    Args:
        model: A Keras model that is built.
        optimizer: Its optimizer, by default the compiled one.
        **kwargs: Further values that can be pickled, such as `batch=0, epoch=0`. They
            become attributes.

    Raises:
        ValueError: If the model is not built.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> state = KerasState(model, epoch=0)
    >>> state.epoch = 3
    >>> state.restore()  # what was committed last: here, at the start
    >>> state.epoch
    0
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        if not model.built:
            raise ValueError(
                "A KerasState needs a model that is built. Received: "
                f"{model.name!r}. Call model.build(input_shape) before."
            )
        self.model = model
        self.optimizer = optimizer or model.optimizer
        self._values = dict(kwargs)
        self._number = next(_numbers)  # the same on all ranks
        self._num_commits = 0
        self._is_resumed = False
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._messages: queue.Queue[tuple[float, int]] = queue.Queue()
        for name, value in kwargs.items():
            setattr(self, name, value)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self.save()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions that are called when the ranks have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the functions that were registered, since the ranks have changed."""
        # What was traced has the number of ranks in it.
        self.model.train_function = self.model.test_function = None
        self._messages = queue.Queue()
        for callback in self._reset_callbacks:
            callback()

    def save(self) -> None:
        """Copy all values to the memory of this process."""
        self._arrays = [keras.ops.convert_to_numpy(v) for v in self._variables()]
        self._values = {name: getattr(self, name) for name in self._values}

    def commit(self) -> None:
        """Copy all values, to which `restore` goes back.

        Under `keras-dist run`, which may start the ranks again, one rank of each host
        also writes them to a temporary file.

        Raises:
            HostsUpdated: On all ranks, if Horovod's elastic mode has changed the hosts;
                `run` takes it.
        """
        self.save()
        self._num_commits += 1
        commit = Commit(self._num_commits, self._arrays, self._values)
        save_commit(commit, self._number)
        self.check_host_updates()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Horovod's elastic mode has changed the hosts; called by another thread."""
        self._messages.put((timestamp, int(update_res)))

    def check_host_updates(self) -> None:
        """Raise an error on all ranks if a rank was informed of other hosts.

        Raises:
            HostsUpdated: See `commit`.
        """
        if not comm.is_elastic():
            return
        change = 0
        while not self._messages.empty():
            change |= self._messages.get()[1]
        everyone = 0
        for found in comm.gather(change):
            everyone |= found
        if everyone:
            raise HostsUpdated(everyone == _REMOVED)

    def restore(self) -> None:
        """Go back to the last commit."""
        for variable, array in zip(self._variables(), self._arrays, strict=True):
            variable.assign(array)
        for name, value in self._values.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Take all values of the first rank, and commit them.

        Raises:
            ValueError: On all ranks, if their variables differ in number or shape.
        """
        self._sync(0)

    def resume(self) -> None:
        """Take the newest commit of earlier starts of this job, in the first call.

        Raises:
            ValueError: On all ranks, if the commit is one of another model.
        """
        if self._is_resumed or not are_commits_saved():
            return
        self._is_resumed = True
        found = saved_commit(self._number)
        numbers = comm.gather(0 if found is None else found.number)
        self._num_commits = max(numbers)
        if self._num_commits == 0:
            return
        root = numbers.index(self._num_commits)
        if found is not None and comm.rank() == root:
            self._arrays, self._values = found.arrays, found.values
        comm.run_on_all(self.restore)
        self._sync(root)
        self.on_reset()

    def _sync(self, root: int) -> None:
        broadcast_variables(self._variables(), root)
        for name, value in broadcast_object(self._current(), root).items():
            setattr(self, name, value)
        self.save()

    def _current(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._values}

    def _variables(self) -> list[Any]:
        optimizer = [] if self.optimizer is None else list(self.optimizer.variables)
        return [*self.model.weights, *optimizer]


class Commit(NamedTuple):
    """What was committed.

    Args:
        number: How many commits there were, with this one.
        arrays: Weights of the model, and variables of its optimizer.
        values: The other values, by their names.
    """

    number: int
    arrays: list[np.ndarray]
    values: dict[str, Any]


def are_commits_saved() -> bool:
    """Tell whether the launcher is one that may start the ranks again."""
    return _job() is not None


def save_commit(commit: Commit, state: int) -> None:
    """Write a commit, on one rank of each host, whole or not at all.

    Args:
        commit: The commit.
        state: Number of the state, by which it is found.

    Raises:
        OSError: If the folder for temporary files cannot be written.
    """
    job = _job()
    if job is None or comm.local_rank() != 0:
        return
    folder = processes.make_lasting_folder(job)
    content = pickle.dumps(tuple(commit))
    write_whole(folder / str(state), content, is_durable=False, mode=0o600)


def saved_commit(state: int) -> Commit | None:
    """Read the last commit of an earlier start of the job on this host.

    Args:
        state: Number of the state.
    """
    job = _job()
    if job is None or RESTART not in os.environ:
        return None
    folder = processes.lasting_folder(job)
    if folder is None or not (folder / str(state)).is_file():
        return None
    return Commit(*pickle.loads((folder / str(state)).read_bytes()))


def _job() -> str | None:
    """Return the id of this job; `None` under other launchers."""
    prefix = processes.mark("")
    jobs = [name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)]
    if not jobs:
        return None
    # Of jobs inside of each other the last. What is behind its id is the number of the
    # host's agent, of which each start has another one.
    return jobs[-1].partition("_")[0]
