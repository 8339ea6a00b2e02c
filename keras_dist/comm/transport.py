"""The only file that starts Horovod, and calls its collectives."""

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from keras_dist import private
from keras_dist.comm import settings
from keras_dist.comm.world import World
from keras_dist.launch.monitor import end_note, record

_INSTALL = "keras-dist install-horovod"

# Horovod counts elements in 32 bits; NCCL in 64.
_MOST_ELEMENTS = 2**31 - 1

# Horovod's names of collectives outside of graphs, whatever name they are given; and
# the names in each graph that this rank has traced.
_KINDS = "Allgather Allreduce Alltoall Broadcast"
_EAGER = {f"Horovod{kind}" for kind in _KINDS.split()}
_traced: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

# A dtype in which nothing is sent, and what Horovod says to a rank that meets it.
_REFUSAL, _REFUSED = tf.int16, "rank had type int16"


def connect(launcher: str, expected: World) -> tuple[ModuleType, World]:
    """Start Horovod; return its module, the link to all ranks, and what it knows.

    Every rank calls this.

    Args:
        launcher: Name of the launcher, for error messages.
        expected: Rank and size that the launcher gave to this process.

    Raises:
        RuntimeError: If Horovod is missing, was built without TensorFlow, or
            connects other processes than the launcher started.
    """
    is_on_cpu = not tf.config.get_visible_devices("GPU")
    starting = contextlib.ExitStack()
    if launcher.startswith("mpirun"):
        settings.prepare(is_on_cpu=is_on_cpu)
        starting.enter_context(settings.limit_start(expected.rank, expected.size))
    if is_on_cpu:
        settings.set_for_cpu()
        starting.enter_context(_batch_scheduling())
    try:
        horovod = importlib.import_module("horovod.tensorflow")
        with starting:
            if (
                threading.current_thread() is threading.main_thread()
                and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            ):
                # Ctrl-C ends this process at once: Python would see it only after all
                # ranks have come, of which one may have left.
                before = signal.signal(signal.SIGINT, signal.SIG_DFL)
                starting.callback(signal.signal, signal.SIGINT, before)
            horovod.init()
    except Exception as error:  # after any error the user has to build Horovod again
        raise RuntimeError(
            f"This process was started by {launcher} as rank {expected.rank} of "
            f"{expected.size}, but Horovod cannot be used here. "
            f"Received: {type(error).__name__}: {error}. "
            f"Run `{_INSTALL}` in this environment, or start the script with plain "
            "`python` to train on one process."
        ) from error
    leave = functools.partial(_leave_horovod, horovod.shutdown)
    os.register_at_fork(after_in_child=leave)
    if horovod.size() != expected.size:
        raise RuntimeError(
            f"{launcher} started {expected.size} processes, but Horovod connects "
            f"{horovod.size()}. It was probably built without the transport of this "
            f"launcher. Run `{_INSTALL} --mpi`, or start with `horovodrun --gloo`."
        )
    world = World(
        rank=horovod.rank(),
        size=horovod.size(),
        local_rank=horovod.local_rank(),
        local_size=horovod.local_size(),
        # Each host has a rank with the first rank's local rank, which is 0.
        num_hosts=horovod.cross_size(),
    )
    return horovod, world


def _leave_horovod(shutdown: Callable[[], None]) -> None:
    """In a forked process, which has none of Horovod's threads: never wait for them.

    Both Horovod's handler at exit and the destructor of its library do.
    """
    atexit.unregister(shutdown)
    libc = ctypes.CDLL(None)
    # The last one is called first, and before all destructors; each with the exit code.
    for function in (libc._exit, libc.fcloseall):
        libc.on_exit(function, None)


@contextlib.contextmanager
def _batch_scheduling() -> Iterator[None]:
    """Threads started in the block do not preempt other threads when they wake up.

    They get the scheduling policy SCHED_BATCH. It is for Gloo's thread that serves the
    sockets. If the sending thread holds the lock of a socket, the serving thread spins
    instead of waiting. It nearly always wakes up in the middle of a send; if it
    preempted the sender on a rank with one core, the sender could only go on at the
    next tick of the system's scheduler, which costs some milliseconds in every
    collective. Source: `Pair::handleEvents` of Gloo.
    """
    before = os.sched_getscheduler(0)
    # A thread inherits the policy of the thread that starts it.
    if before == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # as where the policy has priorities
            os.sched_setscheduler(0, before, os.sched_param(0))


def describe(link: ModuleType) -> str:
    """Name of the transport in use: Gloo or MPI; between GPUs NCCL with one of them."""
    control = "MPI" if link.mpi_built() and link.mpi_enabled() else "Gloo"
    if link.nccl_built() and tf.config.get_visible_devices("GPU"):
        return f"NCCL ({control} for control)"
    return control


def library() -> ModuleType:
    """Horovod's module, also where nothing connects this process to others.

    Raises:
        RuntimeError: If Horovod cannot be imported.
    """
    try:
        return importlib.import_module("horovod.tensorflow")
    except Exception as error:
        raise RuntimeError(
            "Horovod cannot be used here. "
            f"Received: {type(error).__name__}: {error}. Run `{_INSTALL}`."
        ) from error


@contextlib.contextmanager
def record_wait(name: str) -> Iterator[None]:
    """Context manager that records a wait in a collective, and explains errors."""
    with explain_errors(), record.here.wait_in(name):
        yield


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Context manager in which the end of another rank is a short error.

    Raises:
        RuntimeError: Instead of TensorFlow's error, if another rank ended and so shut
            Horovod down while this rank waited in a collective.
        KeyboardInterrupt: If Ctrl-C came meanwhile.
    """
    try:
        yield
    except tf.errors.UnknownError as error:
        if "Horovod has been shut down" not in str(error):
            raise
        raise RuntimeError(end_note.describe_ended_rank()) from None
    except RuntimeError as error:  # Ctrl-C came as TensorFlow made its own error
        if "REPLACED BY KeyboardInterrupt" not in str(error):
            raise
        raise KeyboardInterrupt from None


def run(function: str, link: ModuleType, tensor: Any, name: str, **options: Any) -> Any:
    """Call a function of Horovod: record that this rank waits in it; explain errors.

    In a `tf.function` both surround the tracing alone: the collective runs later.

    By default Horovod puts TensorFlow's name scope before the name. The scope contains
    the names of Keras layers, which differ as soon as one rank has made one more model:
    the ranks would then wait forever. So the scope is ignored.
    """
    count = tensor.shape.num_elements()
    if count is not None and count > _MOST_ELEMENTS and "NCCL" not in describe(link):
        raise ValueError(
            f"Horovod sends at most {_MOST_ELEMENTS:,} elements at once. Received: a "
            f"tensor of the shape {tuple(tensor.shape)}, with {count:,} elements. "
            "Divide it into smaller ones."
        )
    if private.is_compiled_by_xla():
        raise RuntimeError(
            "XLA cannot compile a collective. Received: a function with "
            f"jit_compile=True on {link.size()} ranks. Pass jit_compile=False to "
            "`compile`, or to `tf.function`. `dist_fit`, and `model.fit` with a "
            "callback of keras_dist, compile what is around the collectives."
        )
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        _traced.setdefault(graph, set()).add(name)
    with record_wait(name):
        options |= {"name": name, "ignore_name_scope": True}
        return getattr(link, function)(tensor, **options)


def list_names() -> set[str]:
    """List the names of all collectives in which other ranks may wait for this one."""
    return _EAGER.union(*_traced.values())


@contextlib.contextmanager
def refuse(link: ModuleType, names: Collection[str]) -> Iterator[None]:
    """Context manager in which collectives are errors on the ranks that wait in them.

    All ranks enter it, each when it can, and it ends when all have come.

    Args:
        link: The link to the other ranks.
        names: The names of the collectives; in the end the same ones on all ranks.
    """
    with ThreadPoolExecutor(max_workers=len(names) or 1) as threads:
        for name in names:
            threads.submit(_refuse, link, name)
        yield


def _refuse(link: ModuleType, name: str) -> None:
    """Answer a collective by one of another dtype, until all ranks do."""
    send = tf.function(
        lambda tensor: link.allgather(tensor, name=name, ignore_name_scope=True),
        autograph=False,
    ).get_concrete_function(tf.TensorSpec([1], _REFUSAL))
    with contextlib.suppress(tf.errors.UnknownError), tf.device("CPU:0"):
        while True:  # until Horovod is shut down
            try:
                send(tf.zeros([1], _REFUSAL))
            except (tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError):
                time.sleep(0.01)  # another rank was there, or a thread of this one is
            else:
                return


def is_refused(error: Exception) -> bool:
    """Return True for the error of a collective that another rank has refused."""
    return _REFUSED in str(error)
