"""The state of a training of which there is a last commit."""

import itertools
import queue
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_dist import comm
from keras_dist.horovod import commits
from keras_dist.horovod.collectives import broadcast_object, broadcast_variables

_numbers = itertools.count()

# Horovod's flag of a change of hosts that only takes some away.
_REMOVED = 1


class HostsUpdated(Exception):  # noqa: N818 - it is no error
    """Hosts have come or gone, and the ranks have to connect anew.

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
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
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
        """The ranks have changed: call the functions that were registered."""
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

        Under `keras-dist run`, which may start the ranks anew, one rank of each host
        also writes them to a temporary file.

        Raises:
            HostsUpdated: On all ranks, if Horovod's elastic mode has changed the hosts;
                `run` takes it.
        """
        self.save()
        self._num_commits += 1
        commit = commits.Commit(self._num_commits, self._arrays, self._values)
        commits.save(commit, self._number)
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
        if self._is_resumed or not commits.are_saved():
            return
        self._is_resumed = True
        found = commits.saved(self._number)
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
