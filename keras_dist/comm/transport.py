"""The door to Horovod: the only file that imports it."""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import tensorflow as tf

from keras_dist.comm.world import World

_INSTALL = "keras-dist install-horovod"


def connect(launcher: str, expected: World) -> ModuleType:
    """Horovod, initialized; every rank that the launcher started calls this.

    Raises:
        RuntimeError: If Horovod is missing, was built without TensorFlow, or
            connects other processes than the launcher started.
    """
    try:
        horovod = importlib.import_module("horovod.tensorflow")
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
    return horovod


def world_of(horovod: ModuleType) -> World:
    """The place of this process as Horovod knows it."""
    return World(
        rank=horovod.rank(),
        size=horovod.size(),
        local_rank=horovod.local_rank(),
        local_size=horovod.local_size(),
    )


def describe(horovod: ModuleType) -> str:
    """Name of the transport in use: Gloo or MPI, with NCCL between GPUs."""
    control = "MPI" if horovod.mpi_built() and horovod.mpi_enabled() else "Gloo"
    if horovod.nccl_built() and tf.config.get_visible_devices("GPU"):
        return f"NCCL ({control} for control)"
    return control


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


@explained()
def allreduce_sum(horovod: ModuleType, tensor: Any, *, name: str) -> Any:
    """Sum of `tensor` over all ranks; the same bits on every rank."""
    return horovod.allreduce(tensor, op=horovod.Sum, name=name)


@explained()
def allgather(horovod: ModuleType, tensor: Any, *, name: str) -> Any:
    """The tensors of all ranks, joined along their first axis in rank order."""
    return horovod.allgather(tensor, name=name)


@explained()
def broadcast(horovod: ModuleType, tensor: Any, *, root_rank: int, name: str) -> Any:
    """The tensor of `root_rank`, on every rank."""
    return horovod.broadcast(tensor, root_rank=root_rank, name=name)
