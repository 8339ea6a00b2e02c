"""The protocol of both transports, and what runs around each collective of either.

`horovod_transport` and `tensorflow_transport` implement `Transport`, each in one file.
"""

import atexit
import contextlib
import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_dist import private
from keras_dist.comm.world import World
from keras_dist.launch.monitor import record, watchdog
from keras_dist.launch.monitor.rank_process import ENDED

# What users choose a transport by, and its values.
VARIABLE, HOROVOD, TENSORFLOW = "KERAS_DIST_TRANSPORT", "horovod", "tensorflow"

INSTALL = "keras-dist install-horovod"


class Transport(ABC):
    """The link to the other ranks.

    Attributes:
        world: Rank and size, as the transport knows them.
        most_elements: The largest number of elements of a tensor; 0 for any.
        is_horovod: Whether all functions of Horovod can be called.
        ignored_threads: Ids of threads that poll, which are no sign of progress.
    """

    world: World
    most_elements: int = 0
    is_horovod: bool = False
    ignored_threads: Collection[int] = ()

    @abstractmethod
    def describe(self) -> str:
        """Return the name of the transport, as the plan prints it."""

    @abstractmethod
    def send(self, function: str, tensor: Any, name: str, **options: Any) -> Any:
        """Run "allreduce", "allgather", "broadcast" or "alltoall".

        Args:
            function: Name of the collective. An allreduce is a sum by default. The
                tensors of an allgather may have different numbers of rows.
            tensor: A tensor, in a graph or outside of one.
            name: Name of the collective, by which the ranks find each other.
            **options: `root_rank` of a broadcast; `equal_rows` of an allgather; what
                functions of Horovod take.
        """

    @abstractmethod
    def list_names(self) -> set[str]:
        """List the names by which collectives have to be refused."""

    @abstractmethod
    def refuse(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Context manager in which collectives are errors on ranks that wait in them.

        All ranks enter it, each when it can, and it ends when all have come.

        Args:
            names: Names of `list_names`; in the end the same ones on all ranks.
        """

    @abstractmethod
    def is_refused(self, error: Exception) -> bool:
        """Return True for the error of a collective that another rank has refused."""

    def listen(self) -> AbstractContextManager[None]:
        """Context manager in which refused collectives raise, also those in graphs."""
        return contextlib.nullcontext()

    @abstractmethod
    def leave(self) -> None:
        """End the connection to the other ranks, for good."""


def forget_in_child(leave: Callable[[], None]) -> None:
    """Let forked processes, which have no threads of a transport, not wait for them.

    Both its handler at exit and the destructor of its library do.

    Args:
        leave: The handler.
    """

    def forget() -> None:
        atexit.unregister(leave)
        libc = ctypes.CDLL(None)
        # The last one is called first, and before all destructors; each with the code.
        for function in (libc._exit, libc.fcloseall):
            libc.on_exit(function, None)

    os.register_at_fork(after_in_child=forget)


@contextlib.contextmanager
def record_wait(name: str) -> Iterator[None]:
    """Context manager that records a wait in a collective, and explains errors."""
    with explain_errors(), record.here.wait_in(name):
        yield


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Context manager in which the end of another rank is a short error.

    Raises:
        RuntimeError: Instead of TensorFlow's error, if another rank ended while this
            rank waited in a collective.
        KeyboardInterrupt: If Ctrl-C came meanwhile.
    """
    try:
        yield
    except (tf.errors.UnknownError, tf.errors.UnavailableError) as error:
        if not any(text in str(error) for text in ENDED):
            raise
        raise RuntimeError(watchdog.describe_ended_rank()) from None
    except RuntimeError as error:  # Ctrl-C came as TensorFlow made its own error
        if "REPLACED BY KeyboardInterrupt" not in str(error):
            raise
        raise KeyboardInterrupt from None


def run(function: str, link: Transport, tensor: Any, name: str, **options: Any) -> Any:
    """Run a collective: record that this rank waits in it; explain errors.

    In a `tf.function` both surround the tracing alone: the collective runs later.
    """
    count = tensor.shape.num_elements()
    if count is not None and 0 < link.most_elements < count:
        raise ValueError(
            f"{link.describe()} sends at most {link.most_elements:,} elements at once. "
            f"Received: a tensor of the shape {tuple(tensor.shape)}, with {count:,} "
            "elements. Divide it into smaller ones."
        )
    if private.is_compiled_by_xla():
        raise RuntimeError(
            "XLA cannot compile a collective. Received: a function with "
            f"jit_compile=True on {link.world.size} ranks. Pass jit_compile=False to "
            "`compile`, or to `tf.function`. `dist_fit`, and `model.fit` with a "
            "callback of keras_dist, compile what is around the collectives."
        )
    with record_wait(name):
        return link.send(function, tensor, name, **options)
