"""The door to Horovod: the only file that imports it."""

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import tensorflow as tf

from keras_dist import monitor
from keras_dist.comm.world import World

_INSTALL = "keras-dist install-horovod"

# What tells Horovod that a timeline may be asked for after it has started. Not by
# default: the thread that would write it keeps a core of the first rank busy.
_TIMELINE, _LATER = "HOROVOD_TIMELINE", "DYNAMIC"

# Settings of Horovod where the rank computes on the CPU and nobody has chosen others.
_ON_CPU = {
    # Milliseconds between two looks for something to do. Each look costs the ranks a
    # message, of which a core that also computes feels a thousand in a second.
    "HOROVOD_CYCLE_TIME": "2.5",
    # Small gradients are packed already; to pack large ones that happen to be ready at
    # the same time only copies them twice more, into a buffer that is kept.
    "HOROVOD_FUSION_THRESHOLD": "0",
}


@dataclass(frozen=True)
class Link:
    """Horovod, and the ranks that a collective is for.

    Args:
        horovod: The module `horovod.tensorflow`, initialized.
        process_set: Horovod's own object for the ranks that take part.
    """

    horovod: ModuleType
    process_set: Any


def connect(launcher: str, expected: World, *, is_divided: bool = False) -> Link:
    """A link to all ranks; every rank that the launcher started calls this.

    Args:
        launcher: What started this process, for messages.
        expected: The place that the launcher gave to it.
        is_divided: Whether `divide` is going to be called.

    Raises:
        RuntimeError: If Horovod is missing, was built without TensorFlow, or
            connects other processes than the launcher started.
    """
    is_on_cpu = not tf.config.get_visible_devices("GPU")
    if is_on_cpu:
        for name, value in _ON_CPU.items():
            os.environ.setdefault(name, value)
    if is_divided:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    try:
        horovod = importlib.import_module("horovod.tensorflow")
        with _polite_threads() if is_on_cpu else contextlib.nullcontext():
            horovod.init()
    except Exception as error:  # whatever it is, the user has to build Horovod again
        raise RuntimeError(
            f"This process was started by {launcher} as rank {expected.rank} of "
            f"{expected.size}, but Horovod cannot be used here. "
            f"Received: {type(error).__name__}: {error}. "
            f"Run `{_INSTALL}` in this environment, or start the script with plain "
            "`python` to train on one process."
        ) from error
    if horovod.size() != expected.size:
        raise RuntimeError(
            f"{launcher} started {expected.size} processes, but Horovod connects "
            f"{horovod.size()}. Its build probably lacks the transport of this "
            f"launcher. Run `{_INSTALL} --mpi`, or start with `horovodrun --gloo`."
        )
    return Link(horovod, horovod.global_process_set)


@contextlib.contextmanager
def _polite_threads() -> Iterator[None]:
    """Threads that are started in the block push no other thread off its core.

    Gloo has a thread that serves the sockets. Where the thread that sends holds the
    lock of a socket, it does not wait but looks again, without end; on a rank with one
    core it keeps the other from going on until the system's next tick: some
    milliseconds of every collective. It wakes up in the middle of a send nearly always,
    and so it must not take the core at once. Source: `Pair::handleEvents` of Gloo.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    # A thread begins with the policy of the one that starts it.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def divide(link: Link, ranks: Sequence[int]) -> Link:
    """A link to some of the ranks; all ranks call this, in the same order."""
    if len(ranks) == link.horovod.size():
        return link
    return Link(link.horovod, link.horovod.add_process_set(list(ranks)))


def world_of(link: Link) -> World:
    """The place of this process as Horovod knows it."""
    horovod = link.horovod
    return World(
        rank=horovod.rank(),
        size=horovod.size(),
        local_rank=horovod.local_rank(),
        local_size=horovod.local_size(),
    )


def has_mpi(link: Link) -> bool:
    """Whether the ranks talk over MPI, which alone knows Adasum on CPUs."""
    return link.horovod.mpi_built() and link.horovod.mpi_enabled()


def describe(link: Link) -> str:
    """Name of the transport in use: Gloo or MPI, with NCCL between GPUs."""
    control = "MPI" if has_mpi(link) else "Gloo"
    if link.horovod.nccl_built() and tf.config.get_visible_devices("GPU"):
        return f"NCCL ({control} for control)"
    return control


def built() -> list[str]:
    """Transports that Horovod was built with, as `horovodrun` calls them.

    Raises:
        RuntimeError: If Horovod cannot be imported.
    """
    try:
        horovod = importlib.import_module("horovod.tensorflow")
    except Exception as error:
        raise RuntimeError(
            "Horovod cannot be used here. "
            f"Received: {type(error).__name__}: {error}. Run `{_INSTALL}`."
        ) from error
    known = {"gloo": horovod.gloo_built, "mpi": horovod.mpi_built}
    return [name for name, is_built in known.items() if is_built()]


def allow_timeline() -> None:
    """Let a timeline be asked for; before `connect`."""
    os.environ.setdefault(_TIMELINE, _LATER)


def check_timeline() -> None:
    """Raise where a timeline cannot be asked for."""
    given = os.environ.get(_TIMELINE)
    if given is None:
        raise ValueError(
            "Horovod had started already when it was asked for a timeline. Received: "
            f"no {_TIMELINE}. Start the job with {_TIMELINE}={_LATER} in its "
            "environment, or let this fit come before all else that needs the ranks."
        )
    if given != _LATER:
        raise ValueError(
            "Horovod writes a timeline already. "
            f"Received: {_TIMELINE}={given!r}. Unset it, or pass no `timeline`."
        )


def start_timeline(link: Link, path: str) -> None:
    """Let the first rank record all collectives; every rank calls this."""
    link.horovod.start_timeline(path)


def stop_timeline(link: Link) -> None:
    """End the recording, and close the file."""
    link.horovod.stop_timeline()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Inside the block, the end of another rank is told in one line.

    Raises:
        RuntimeError: In place of TensorFlow's error, where Horovod was shut down by
            another rank while this one waited for it.
    """
    try:
        yield
    except tf.errors.UnknownError as error:
        if "Horovod has been shut down" not in str(error):
            raise
        raise RuntimeError(
            "Another rank has ended while this one waited for it. "
            "Its own error, printed by that rank, is the cause."
        ) from None


def _collective(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Let a collective say that this rank is in it, and how it fails."""

    @functools.wraps(collective)
    def recorded(*args: Any, name: str, **kwargs: Any) -> Any:
        with explained(), monitor.here.waiting(name):
            return collective(*args, name=name, **kwargs)

    return recorded


def _common(link: Link, name: str) -> dict[str, Any]:
    """Arguments of every collective.

    The name is taken as it is. By itself Horovod puts TensorFlow's scopes before it,
    in which Keras's names of layers stand: one rank that has made one more model would
    call them otherwise, and all would wait for ever.
    """
    return {"name": name, "ignore_name_scope": True, "process_set": link.process_set}


@_collective
def allreduce_sum(link: Link, tensor: Any, *, name: str) -> Any:
    """Sum of `tensor` over all ranks; the same bits on every rank."""
    common = _common(link, name)
    return link.horovod.allreduce(tensor, op=link.horovod.Sum, **common)


@_collective
def allreduce_adasum(link: Link, tensor: Any, *, name: str) -> Any:
    """The adaptive sum of `tensor` over all ranks (Maleki et al., 2021)."""
    common = _common(link, name)
    return link.horovod.allreduce(tensor, op=link.horovod.Adasum, **common)


@_collective
def allgather(link: Link, tensor: Any, *, name: str) -> Any:
    """The tensors of all ranks, joined along their first axis in rank order."""
    return link.horovod.allgather(tensor, **_common(link, name))


@_collective
def alltoall(link: Link, tensor: Any, *, name: str) -> Any:
    """Slice r of every rank's tensor, on rank r, joined in rank order.

    Args:
        link: The ranks that take part.
        tensor: Its first axis is as long as there are ranks.
        name: The same on all ranks.
    """
    return link.horovod.alltoall(tensor, **_common(link, name))


@_collective
def broadcast(link: Link, tensor: Any, *, root_rank: int, name: str) -> Any:
    """The tensor of `root_rank`, on every rank."""
    # Horovod counts the root among all ranks, also within a set.
    ranks = link.process_set.ranks
    root = ranks[root_rank] if ranks else root_rank
    common = _common(link, name)
    return link.horovod.broadcast(tensor, root_rank=root, **common)
